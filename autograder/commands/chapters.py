"""The command for chapter authors: check-course."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from autograder.commands.hints import read_hints
from autograder.commands.sizes import print_sizes
from autograder.commands.terminal import SHORT, AsJson, UsageError, bar, print_json, require_chapter, show, table
from autograder.contract.text import count_of
from course.curriculum import CHAPTERS, ROOT, Chapter, contract_folder, home, is_own, own_page

# The files of a chapter, and how to create each; references and exercises are built.
FILES = {
    "autograder/chapters/{name}/__init__.py": "write its contract",
    "autograder/chapters/{name}/wrapping.py": "say there how its functions are made into programs",
    "autograder/chapters/{name}/mutants.py": "write wrong answers there",
    "autograder/chapters/{name}/alternatives.py": "write other right answers there",
    "autograder/chapters/{name}/hints.md": "write three or four hints a function there",
    "autograder/chapters/{name}/{name}_test.py": "test its oracles and limits there",
    "solutions/{name}.py": "write the notebook's source there",
    "site/pages/{name}.md": "write its page",
    "site/pages/profiling/{name}.md": "write its walkthrough",
    "site/examples/{name}.py": "compute there what its pages show",
}
# The files of a chapter in a course folder, which has no page on the site.
OWN_FILES = {name.removeprefix("autograder/"): do for name, do in FILES.items() if not name.startswith("site/")}
MUTANTS, ALTERNATIVES, HINTS = 5, (2, 3), (3, 4)
# The openings of the sentences that a new chapter's author replaces.
PLACEHOLDERS = ("Say here what", "Tell here how", "Name papers and sections here")
Problem = tuple[str, str]


def check_course(
    chapters: Annotated[list[str] | None, Argument(metavar="CHAPTER", help="All, if left out.")] = None,
    sizes: Annotated[bool, Option("--sizes", help="Count files and lines instead.")] = False,
    promises: Annotated[
        bool, Option("--promises", help="Show what each notebook requires, and which fact checks it, instead.")
    ] = False,
    seconds: Annotated[
        Path | None, Option(metavar="FILE", help="With --sizes: add test times from pytest --junitxml=FILE.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Report missing or stale parts of the course's chapters, with remedies. Exit status 1 if there are any."""
    if seconds and not sizes:
        raise UsageError("--seconds adds a column to --sizes; give --sizes, too")
    names = {require_chapter(name) for name in chapters or []}
    entries = [entry for entry in CHAPTERS if not names or entry.name in names]
    if sizes:
        print_sizes(ROOT, entries, seconds, as_json)
        return
    if promises:
        _print_promises([entry.name for entry in entries], as_json)
        return
    rows = []
    with bar() as update:
        for done, entry in enumerate(entries):
            update("looking at chapters", done, len(entries))
            rows += [{"chapter": entry.name, "problem": problem, "do": do} for problem, do in problems(entry, ROOT)]
        update("looking at chapters", len(entries), len(entries))
    if as_json:
        print_json({"chapters": [entry.name for entry in entries], "problems": rows})
    elif rows:
        listed = table("chapter", "what is missing or stale", "what to do")
        for row in rows:
            listed.add_row(row["chapter"], row["problem"], row["do"])
        show(listed)
    else:
        show(f"{len(entries)} chapter{'s' if len(entries) > 1 else ''}, and nothing is missing or stale")
    raise typer.Exit(SHORT if rows else 0)


def _print_promises(names: list[str], as_json: bool) -> None:
    from autograder.release.promises import promised

    rows = [
        {"chapter": name, "function": function, "sentence": quote, "facts": list(facts)}
        for name in names
        for function, quotes in promised(name).items()
        for quote, facts in quotes.items()
    ]
    if as_json:
        print_json({"chapters": names, "promises": rows})
        return
    listed = table("function", "what the notebook says", "what is judged")
    for row in rows:
        listed.add_row(row["function"], row["sentence"], ", ".join(row["facts"]) or "nothing: it explains")
    show(listed)


def problems(entry: Chapter, root: Path) -> Iterator[Problem]:
    """Yield everything missing or stale in a chapter, each with its remedy."""
    root = home(entry.name) if entry.own else root
    missing = {file.format(name=entry.name): do for file, do in (OWN_FILES if entry.own else FILES).items()}
    # In a large chapter, the wrapping module is a folder.
    missing = {
        file: do
        for file, do in missing.items()
        if not (root / file).is_file() and not (root / file.removesuffix(".py") / "__init__.py").is_file()
    }
    yield from ((f"{file} is missing", do) for file, do in missing.items())
    if any(file.endswith(".py") for file in missing):
        return
    try:
        contract, mutants, alternatives = _modules(entry.name)
    except Exception as error:
        yield f"it cannot be imported: {type(error).__name__}: {error}", "fix that"
        return
    yield from _answers(entry.name, contract, mutants, alternatives)
    yield from _headings(contract)
    yield from _placeholders(entry, root)
    yield from _built(entry.name)


def _modules(name: str) -> tuple[Any, Any, Any]:
    from autograder.contract.task import load

    importlib.import_module(f"solutions.{name}")
    folder = f"autograder.chapters.{name}"
    mutants, alternatives = (importlib.import_module(f"{folder}.{part}") for part in ("mutants", "alternatives"))
    return load(name), mutants.MUTANTS, alternatives.ALTERNATIVES


def _answers(name: str, contract: Any, mutants: Any, alternatives: Any) -> Iterator[Problem]:
    """Check mutants, alternatives and hints: some for every function, and a mutant for every fact."""
    folder = contract_folder(name).relative_to(home(name)).as_posix()
    tasks = [task.name for task in contract.tasks]
    wrong = Counter(mutant.task for mutant in mutants)
    hints = read_hints(name) if (contract_folder(name) / "hints.md").exists() else {}
    for task in tasks:
        if wrong[task] < MUTANTS:
            yield (
                f"{task} has {count_of(wrong[task], 'mutant')} of at least {MUTANTS}",
                f"write more in {folder}/mutants.py",
            )
        if not ALTERNATIVES[0] <= (count := len(alternatives.get(task, ()))) <= ALTERNATIVES[1]:
            do = "write more in" if count < ALTERNATIVES[0] else "keep the three that differ most in"
            yield f"{task} has {count_of(count, 'alternative')}, not two or three", f"{do} {folder}/alternatives.py"
        if hints and not HINTS[0] <= (count := len(hints.get(task, ()))) <= HINTS[1]:
            yield f"{task} has {count_of(count, 'hint')}, not three or four", f"edit {folder}/hints.md"
    for task in sorted({*wrong, *alternatives, *hints} - {*tasks}):
        yield f"{task} is not a function of the contract", f"rename it in {folder}/, or take it out"
    shown = {name for mutant in mutants for fact in mutant.fails for name in (fact, f"{mutant.task}.{fact}")}
    for fact in sorted(set(contract.explained_in) - shown - ADVICE):
        yield (
            f"no mutant fails {fact!r}",
            f"write one in {folder}/mutants.py, or drop the fact and its line in `explained_in`",
        )


def _headings(contract: Any) -> Iterator[Problem]:
    """Check that the pages have the headings that facts refer to."""
    for page in sorted({page for page, _ in contract.explained_in.values()}):
        path = own_page(page) or ROOT / "site" / "pages" / f"{page}.md"
        shown = path.relative_to(home(page) if is_own(page) else ROOT)
        if not path.is_file():
            yield f"EXPLAINED_IN refers to {shown}, which does not exist", "write the page or edit EXPLAINED_IN"
            continue
        headings = {line.strip("# ") for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")}
        for heading in sorted({heading for at, heading in contract.explained_in.values() if at == page} - headings):
            yield f"{shown} has no heading “{heading}”, which EXPLAINED_IN refers to", "edit the page or EXPLAINED_IN"


def _placeholders(entry: Chapter, root: Path) -> Iterator[Problem]:
    """Check that no page or notebook still has a sentence that `new-chapter` wrote for its author to replace."""
    files = ["solutions/{0}.py", "site/pages/{0}.md", "site/pages/profiling/{0}.md", "chapters/{0}/page.md"]
    for file in (name.format(entry.name) for name in files):
        lines = (root / file).read_text(encoding="utf-8").splitlines() if (root / file).is_file() else []
        for number, line in enumerate(lines, 1):
            if line.lstrip("# ").startswith(PLACEHOLDERS):
                yield f"{file}, line {number}, is a placeholder of the template", "write it"


# Facts of weight 0, which no mutant needs to fail.
ADVICE = {"compiled exposed", "exposed communication", "FLOPs"}


def _built(name: str) -> Iterator[Problem]:
    from autograder.contract.task import references
    from autograder.release import notebook, promises, reference_metrics

    if promises.promised(name):
        do = f"edit PROMISES in {contract_folder(name).relative_to(home(name)).as_posix()}/__init__.py"
        yield from ((problem, do) for problem in promises.problems(name))

    build = f"meshcraft build {name}"
    try:
        if notebook.stale(name):
            yield f"exercises/{name}/{name}.ipynb is not built from the current solution", build
    except notebook.BuildError as error:
        yield str(error), "fix that"
    references.cache_clear()
    try:
        measured = reference_metrics.measure(name)
    except notebook.BuildError as error:
        yield str(error), "fix that"
        return
    if references(name) != measured:
        folder = contract_folder(name).relative_to(home(name)).as_posix()
        yield f"{folder}/references.json is not what references and baselines measure", build

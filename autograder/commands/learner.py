"""The learner's commands: list, start, check, hint, reset."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer

from autograder.commands.hints import read_hints
from autograder.commands.terminal import (
    FAULT,
    SHORT,
    AsJson,
    UsageError,
    out,
    print_json,
    require_chapter,
    spinner,
    table,
)
from autograder.progress import (
    Best,
    forget,
    graded_cells,
    hidden_folder,
    is_stub,
    next_function,
    passing,
    recall,
    remember,
    remember_hint,
)
from course.curriculum import CHAPTERS, NOTEBOOKS, ROOT, Function, home
from course.curriculum import chapter as find_chapter

_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")

# Its page_config.json disables nbgrader's instructor features and the prompt about fetching news.
LABCONFIG = ROOT / "autograder" / "release"
ChapterName = Annotated[str, typer.Argument(metavar="CHAPTER", help="A chapter, as `meshcraft list` names it.")]
FunctionName = Annotated[str | None, typer.Argument(metavar="[FUNCTION]", help="One function; all, if left out.")]
NotebookFile = Annotated[Path | None, typer.Option(help="A notebook other than the one in the working folder.")]


class Mesh(str, Enum):  # noqa: UP042  typer shows the values
    """The devices that functions are judged on: emulated only, or real ones as well."""

    emulated = "emulated"
    real = "real"


# A function's states, with the mark and colour of each.
STATES = {
    "passes": ("✓", "green"),
    "fails": ("✗", "red"),
    "not judged": ("○", "yellow"),
    "changed since": ("○", "yellow"),
    "not started": ("·", "dim"),
}


def chapters(
    chapter: Annotated[str | None, typer.Argument(metavar="[CHAPTER]", help="Its functions, one by one.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Your best times and bytes, next to the reference's.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the curriculum and your progress, by chapter and function; or your personal bests."""
    names = [require_chapter(chapter, or_primer=True)] if chapter else [entry.name for entry in NOTEBOOKS]
    rows = [chapter_row(name) for name in names]
    if as_json:
        print_json({"chapters": rows})
    elif best:
        _show_bests(rows)
    elif chapter:
        show_functions(rows[0])
    else:
        shown = table("chapter", "", "functions")
        for row in rows:
            shown.add_row(f"[bold]{row['chapter']}[/]", row["title"], _progress_text(row))
        out().print(shown)
        legend = "   ".join(f"[{colour}]{mark}[/] {state}" for state, (mark, colour) in STATES.items())
        out().print(
            f"\n{legend}\n[dim]meshcraft start CHAPTER begins one, meshcraft list CHAPTER names its functions[/]"
        )


def show_functions(row: dict[str, Any]) -> None:
    """Show a chapter's functions and the state of each as a table."""
    out().print(f"[bold]{row['chapter']}[/]  {row['title']}: {row['summary']}\n")
    shown = table("", "", "", "", "")
    shown.columns[1].no_wrap = True
    for entry in row["functions"]:
        mark, colour = STATES[entry["state"]]
        hints = f"{entry['hints']} of {entry['of_hints']} hints shown" if entry["hints"] else ""
        estimate = Function(entry["function"], entry["minutes"], entry["difficulty"]).text
        state = f"[{colour}]{entry['state']}[/]"
        shown.add_row(f"[{colour}]{mark}[/]", entry["function"], state, estimate, f"[dim]{hints}[/]")
    out().print(shown)
    if row["functions"]:
        following = next_function([entry["function"] for entry in row["functions"]], dict.fromkeys(row["passed"], True))
        out().print(
            f"\nNext: {following}." if following else f"\nAll functions of {row['chapter']} pass.", markup=False
        )
        out().print("[dim]times are estimates for those who have read the page, and not measured[/]")


def _show_bests(rows: list[dict[str, Any]]) -> None:
    from autograder.render import quantity

    shown = table("", "yours", "reference", "", right=("yours", "reference"))
    for row in rows:
        for name, facts in row["best"].items():
            shown.add_row(f"[bold]{name}[/]", "", "", f"[dim]{row['chapter']}[/]")
            for fact, best in facts.items():
                colour = "green" if best["yours"] < 0.995 * best["reference"] else ""
                yours, reference = (quantity(best[column], best["unit"]) for column in ("yours", "reference"))
                shown.add_row(f"  {fact}", f"[{colour}]{yours}[/]" if colour else yours, reference, best["unit"])
    nothing = "nothing yet: times and bytes appear here once a function passes"
    out().print(shown if shown.row_count else nothing)


def start(
    chapter: ChapterName,
    open_it: Annotated[bool, typer.Option("--open/--no-open", help="Open the notebook in JupyterLab.")] = True,
) -> None:
    """Copy a chapter's exercise, or the primer, into the working folder, unless it exists, and open it."""
    require_chapter(chapter, or_primer=True)
    target = find_notebook(chapter) or _usual_place(chapter)
    if target.exists():
        out().print(f"{target} already exists and was not changed", markup=False)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(exercise_text(chapter), encoding="utf-8")
        out().print(f"wrote {target}", markup=False)
    if open_it:
        _open_in_jupyterlab(target)
    out().print(f"open it with: jupyter lab {target}", markup=False)


def _open_in_jupyterlab(notebook: Path) -> NoReturn:
    """Replace this process with JupyterLab in the working folder; it receives Ctrl-C, and its terminals open there."""
    as_root = ["--allow-root"] if os.geteuid() == 0 else []  # in containers
    without_teaching = os.pathsep.join(filter(None, [str(LABCONFIG), os.environ.get("JUPYTER_CONFIG_PATH")]))
    # It prints the notebook's address: the only way in without a browser.
    flags = [f"--ServerApp.root_dir={Path.cwd()}", f"--LabApp.default_url=/lab/tree/{notebook.as_posix()}"]
    jupyter = [sys.executable, "-m", "jupyterlab", *as_root, *flags]
    sys.stdout.flush()
    os.execve(sys.executable, jupyter, {**os.environ, "JUPYTER_CONFIG_PATH": without_teaching})


def check(
    chapter: ChapterName,
    function: FunctionName = None,
    notebook: NotebookFile = None,
    solution: Annotated[bool, typer.Option("--solution", help="Judge the course's own solution.")] = False,
    aot: Annotated[bool, typer.Option("--aot", help="Also ask the GPU compiler (extra `aot`); advice, no points.")] = (
        False
    ),
    mesh: Annotated[Mesh, typer.Option(help="real: also measure speed and memory on this machine's GPUs.")] = (
        Mesh.emulated
    ),
    as_json: AsJson = False,
) -> None:
    """Judge your notebook as saved on disk. Exit status 0: everything passed; 1: something failed."""
    require_chapter(chapter)
    if solution and notebook:
        raise UsageError("--solution judges the course's own functions and --notebook a file; give one of them")
    path = None if solution else require_notebook(chapter, notebook)
    doing = f"judging {function or 'all functions'} of {chapter}; this may take a minute"
    with spinner(f"judging {chapter}", announced=doing) as say:
        from autograder import check as judge
        from autograder.contract import task as contract

        try:
            names = [contract.load(chapter).task(function).name] if function else None
        except LookupError as error:
            raise UsageError(str(error)) from None
        options = {"progress": say, "more": _more_facts(chapter, aot, mesh, say)}
        if path is None:
            report = judge.check_solution(chapter, names, **options)
        else:
            report = judge.check_notebook(path, chapter, names, **options)
    if path is not None:
        remember(path, chapter, report.functions)
    from autograder.render import Prose, facts_table, word_in_json

    if as_json:
        rows = [{**row, "verdict": word_in_json(row["verdict"])} for row in report.to_json()["functions"]]
        print_json({**report.to_json(), "functions": rows})
    else:
        out().print(facts_table(report), crop=False)
        passed = [result for result in report.functions if result.verdict == "pass"]
        if path is not None and passed:
            following = next_function(find_chapter(chapter).names, passing(path, chapter))
            out().print(Prose(judge.next_step(chapter, passed[-1], following)), crop=False)
    if any(result.verdict == "needs_human" for result in report.functions):
        raise typer.Exit(FAULT)
    raise typer.Exit(0 if report.passed else SHORT)


def _more_facts(chapter: str, aot: bool, mesh: Mesh, say: Callable[[str], None]) -> list[Any]:
    extra_facts: list[Any] = []
    if aot:
        from autograder.learner.compiled import CompiledFacts

        extra_facts.append(CompiledFacts(chapter, say))
    if mesh is Mesh.real:
        from autograder.learner.hardware_check import measured_here

        extra_facts.append(measured_here(chapter, say))
    return extra_facts


def hint(
    chapter: ChapterName,
    function: FunctionName = None,
    number: Annotated[int | None, typer.Argument(metavar="[NUMBER]", help="One that was shown before.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All that were shown before.")] = False,
    notebook: NotebookFile = None,
) -> None:
    """Show one more hint for a function: by default, for the first that does not pass yet."""
    require_chapter(chapter)
    path = notebook or find_notebook(chapter) or _usual_place(chapter)
    if function and function.isdecimal():
        function, number = None, int(function)
    show_hint(path, chapter, function, number, every)


def show_hint(path: Path, chapter: str, function: str | None, number: int | None = None, every: bool = False) -> None:
    """Show a function's next hint, the hint with this number, or all hints shown so far."""
    hints, known = read_hints(chapter), recall(path, chapter)
    passed = passing(path, chapter)
    name = function or next_function(hints, passed)
    if not name:
        from autograder.render import Prose

        text = f"all functions of {chapter} pass; `meshcraft hint {chapter} FUNCTION` still shows the hints of one"
        out().print(Prose(text), crop=False)
        return
    if name not in hints:
        raise UsageError(f"{chapter} has no hints for {name!r}, only for: {', '.join(hints)}")
    tiers, before = hints[name], known.hints.get(name, 0)
    if every and not before:
        raise UsageError(f"no hint for {name} has been shown yet; `meshcraft hint {chapter} {name}` shows the first")
    if number is not None and not 1 <= number <= min(before + 1, len(tiers)):
        raise UsageError(
            f"{name} has {len(tiers)} hints, and you have seen {before}; without a number you get the next"
        )
    last = number or min(before + 1, len(tiers))
    shown = range(1, before + 1) if every else [last]
    remember_hint(path, chapter, name, max(before, *shown))
    from rich.markdown import Markdown

    from autograder.render import WIDEST, Prose

    console = out()
    for tier in shown:
        console.print(f"[bold]{name}[/]  hint {tier} of {len(tiers)}")
        # Without colours, code keeps its backticks.
        text = tiers[tier - 1] if console.color_system else _CODE.sub(r"`` `\1` ``", tiers[tier - 1])
        console.print(Markdown(text), width=min(console.width, WIDEST))
    next_text = f"`meshcraft hint {chapter} {name}` again shows the next one."
    last_text = f"That was the last one. `meshcraft site {chapter}` opens the page with the theory behind it."
    console.print(Prose(last_text if shown[-1] == len(tiers) else next_text, "dim"), crop=False)


def reset(
    chapter: ChapterName,
    function: FunctionName = None,
    notebook: NotebookFile = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Reset the exercise, or one of its functions. Asks first, and backs up your version."""
    require_chapter(chapter, or_primer=True)
    path = require_notebook(chapter, notebook)
    fresh = _with_stub(path, chapter, function) if function else exercise_text(chapter)
    target = f"{function} in {path}" if function else str(path)
    if not yes:
        typer.confirm(f"Reset {target} to the original?", abort=True)
    backup = back_up(path)
    path.write_text(fresh, encoding="utf-8")
    if chapter in {entry.name for entry in CHAPTERS}:
        forget(path, chapter, [function] if function else find_chapter(chapter).names)
    out().print(f"reset; your version is in {backup}", markup=False)


def back_up(path: Path) -> Path:
    """Back up a file and print the backup's path."""
    backup = hidden_folder(path) / "backups" / f"{path.stem}-{datetime.now():%Y%m%d-%H%M%S-%f}{path.suffix}"
    backup.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, backup)
    return backup


def find_notebook(chapter: str) -> Path | None:
    """The learner's notebook in the working folder."""
    places = (_usual_place(chapter), Path(f"{chapter}.ipynb"))
    return next((place for place in places if place.exists()), None)


def _usual_place(chapter: str) -> Path:
    return Path(chapter) / f"{chapter}.ipynb"


def require_notebook(chapter: str, given: Path | None) -> Path:
    """The given notebook, or the learner's.

    Raises:
        UsageError: There is none.
    """
    if given is not None:
        if given.is_dir():
            raise UsageError(f"{given} is a folder; name the notebook in it")
        if not given.is_file():
            raise UsageError(f"there is no notebook {given}")
        return given
    path = find_notebook(chapter)
    if path is None:
        raise UsageError(
            f"there is no {chapter}/{chapter}.ipynb here; `meshcraft start {chapter}` makes it, "
            "`--notebook FILE` names another one"
        )
    return path


def exercise_text(chapter: str) -> str:
    """The released exercise: the committed one, else built from the solution."""
    committed = home(chapter) / "exercises" / chapter / f"{chapter}.ipynb"
    if committed.exists():
        return committed.read_text(encoding="utf-8")
    from autograder.release.notebook import exercise_text as built

    return built(chapter)


def _with_stub(path: Path, chapter: str, function: str) -> str:
    import nbformat

    from autograder.release.converters import grade_id_of, notebook_text

    def cell_of(notebook: Any) -> Any:
        return next((cell for cell in notebook.cells if grade_id_of(cell) == function), None)

    stub = cell_of(nbformat.reads(exercise_text(chapter), as_version=4))
    if stub is None:
        raise UsageError(f"{chapter} has no function {function!r}")
    try:
        notebook = nbformat.read(path, as_version=4)
    except Exception as error:
        raise UsageError(
            f"{path} is not a notebook ({error}); reset the whole notebook: meshcraft reset {chapter}"
        ) from None
    cell = cell_of(notebook)
    if cell is None:
        raise UsageError(f"{path} has lost the cell of {function}; reset the whole notebook: meshcraft reset {chapter}")
    cell.source = stub.source
    return notebook_text(notebook)


def chapter_row(name: str) -> dict[str, Any]:
    """A chapter's entry in `list`, as plain data."""
    path, entry = find_notebook(name), next(entry for entry in NOTEBOOKS if entry.name == name)
    row = {"chapter": name, "title": entry.title, "summary": entry.summary, "started": path is not None}
    hints = read_hints(name) if entry.functions else {}
    known = recall(path or _usual_place(name), name)
    states = function_states(name, path)
    functions = [
        {
            "function": function.name,
            "state": states[function.name],
            "minutes": function.minutes,
            "difficulty": function.difficulty,
            "hints": known.hints.get(function.name, 0),
            "of_hints": len(hints.get(function.name, ())),
        }
        for function in entry.functions
    ]
    passed = [function for function in entry.names if states[function] == "passes"]
    best: dict[str, dict[str, Best]] = {
        function: known.best[function] for function in entry.names if known.best.get(function)
    }
    data = {**row, "passed": passed, "judged": sorted(known.passed), "functions": functions, "best": best}
    return msgspec.to_builtins(data)


def function_states(chapter: str, notebook: Path | None) -> dict[str, str]:
    """The state of each function of a chapter: one of ``STATES``."""
    names = next(entry.names for entry in NOTEBOOKS if entry.name == chapter)
    known = recall(notebook or _usual_place(chapter), chapter)
    written = graded_cells(notebook) if notebook and names else {}

    def state(name: str) -> str:
        if notebook is None or is_stub(written.get(name, ""), name):
            return "not started"
        if name not in known.passed:
            return "not judged" if name in written else "not started"
        if known.changed(name, written):
            return "changed since"
        return "passes" if known.passed[name] else "fails"

    return {name: state(name) for name in names}


def _progress_text(row: dict[str, Any]) -> str:
    functions = row["functions"]
    if not functions:
        return "[dim]nothing to write[/]"
    marks = "".join("[{1}]{0}[/]".format(*STATES[function["state"]]) for function in functions)
    return f"{len(row['passed']):2} of {len(functions):2}  {marks}"

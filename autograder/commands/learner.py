"""The learner's commands: list, start, check, hint, reset."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer

from autograder.commands.hints import read_hints, show_hint
from autograder.commands.notebooks import (
    back_up,
    exercise_text,
    find_notebook,
    require_notebook,
    usual_place,
    with_stub,
)
from autograder.commands.terminal import (
    FAULT,
    SHORT,
    AsJson,
    UsageError,
    out,
    print_json,
    require_chapter,
    require_function,
    spinner,
    table,
)
from autograder.progress import (
    Best,
    forget,
    graded_cells,
    is_stub,
    next_function,
    passing,
    recall,
    remember,
)
from course.curriculum import CHAPTERS, NOTEBOOKS, ROOT, Function
from course.curriculum import chapter as find_chapter

# Its page_config.json disables nbgrader's instructor features and the prompt about fetching news.
LABCONFIG = ROOT / "autograder" / "release"
ChapterName = Annotated[str, typer.Argument(metavar="CHAPTER", help="A chapter, as `meshcraft list` names it.")]
FunctionName = Annotated[str | None, typer.Argument(metavar="FUNCTION", help="One function; all, if left out.")]
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
    chapter: Annotated[str | None, typer.Argument(metavar="CHAPTER", help="Its functions, one by one.")] = None,
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
    target = find_notebook(chapter) or usual_place(chapter)
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
    names = [require_function(chapter, function)] if function else None
    if solution and notebook:
        raise UsageError("--solution judges the course's own functions and --notebook a file; give one of them")
    path = None if solution else require_notebook(chapter, notebook)
    doing = f"judging {function or 'all functions'} of {chapter}; this may take a minute"
    with spinner(f"judging {chapter}", announced=doing) as say:
        from autograder import check as judge

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
    number: Annotated[int | None, typer.Argument(metavar="NUMBER", help="One that was shown before.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All that were shown before.")] = False,
    notebook: NotebookFile = None,
) -> None:
    """Show one more hint for a function: by default, for the first that does not pass yet."""
    require_chapter(chapter)
    path = notebook or find_notebook(chapter) or usual_place(chapter)
    if function and function.isdecimal():
        function, number = None, int(function)
    if function:
        require_function(chapter, function)
    show_hint(path, chapter, function, number, every)


def reset(
    chapter: ChapterName,
    function: FunctionName = None,
    notebook: NotebookFile = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Reset the exercise, or one of its functions. Asks first, and backs up your version."""
    require_chapter(chapter, or_primer=True)
    if function:
        require_function(chapter, function)
    path = require_notebook(chapter, notebook)
    fresh = with_stub(path, chapter, function) if function else exercise_text(chapter)
    target = f"{function} in {path}" if function else str(path)
    if not yes:
        typer.confirm(f"Reset {target} to the original?", abort=True)
    backup = back_up(path)
    path.write_text(fresh, encoding="utf-8")
    if chapter in {entry.name for entry in CHAPTERS}:
        forget(path, chapter, [function] if function else find_chapter(chapter).names)
    out().print(f"reset; your version is in {backup}", markup=False)


def chapter_row(name: str) -> dict[str, Any]:
    """A chapter's entry in `list`, as plain data."""
    path, entry = find_notebook(name), next(entry for entry in NOTEBOOKS if entry.name == name)
    row = {"chapter": name, "title": entry.title, "summary": entry.summary, "started": path is not None}
    hints = read_hints(name) if entry.functions else {}
    known = recall(path or usual_place(name), name)
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
    known = recall(notebook or usual_place(chapter), chapter)
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

"""What a learner types: list, start, check, hint, reset."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

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
from course.curriculum import NOTEBOOKS

ChapterName = Annotated[str, typer.Argument(metavar="CHAPTER", help="A chapter, as `meshcraft list` names it.")]
FunctionName = Annotated[str | None, typer.Argument(metavar="[FUNCTION]", help="One function; all, if left out.")]
NotebookFile = Annotated[Path | None, typer.Option(help="Another notebook than the one in the working folder.")]


class Mesh(str, Enum):  # noqa: UP042  typer shows the values
    """What functions are judged on: emulated devices alone, or real ones as well."""

    emulated = "emulated"
    real = "real"


def chapters(as_json: AsJson = False) -> None:
    """The curriculum, and how far you are."""
    rows = [_chapter_row(entry.name, entry.title, entry.summary) for entry in NOTEBOOKS]
    if as_json:
        print_json({"chapters": rows})
        return
    shown = table("chapter", "", "progress", gap=3)
    for row in rows:
        shown.add_row(f"[bold]{row['chapter']}[/]", f"{row['title']}: {row['summary']}", _progress_text(row))
    out().print(shown)


def start(
    chapter: ChapterName,
    open_it: Annotated[bool, typer.Option("--open/--no-open", help="Open the notebook in JupyterLab.")] = True,
) -> None:
    """Copy a chapter's exercise, or the primer, into the working folder, unless it is there, and open it."""
    require_chapter(chapter, or_primer=True)
    target = find_notebook(chapter) or _usual_place(chapter)
    if target.exists():
        out().print(f"{target} is there already; it stays as it is", markup=False)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(exercise_text(chapter), encoding="utf-8")
        out().print(f"wrote {target}", markup=False)
    if open_it:
        raise typer.Exit(subprocess.call([sys.executable, "-m", "jupyterlab", str(target)]))
    out().print(f"open it with: jupyter lab {target}", markup=False)


def check(
    chapter: ChapterName,
    function: FunctionName = None,
    notebook: NotebookFile = None,
    solution: Annotated[bool, typer.Option("--solution", help="Judge the course's own solution.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Every case and lens, as in official grading.")] = False,
    aot: Annotated[bool, typer.Option("--aot", help="Also ask the GPU compiler (extra `aot`); advice, no points.")] = (
        False
    ),
    mesh: Annotated[Mesh, typer.Option(help="real: also measure speed and memory on this machine's GPUs.")] = (
        Mesh.emulated
    ),
    as_json: AsJson = False,
) -> None:
    """Judge your notebook as it is on disk. Exit status 0: everything passed; 1: something fell short."""
    require_chapter(chapter)
    if solution and notebook:
        raise UsageError("--solution judges the course's own functions and --notebook a file; give one of them")
    path = None if solution else require_notebook(chapter, notebook)
    with spinner(f"judging {chapter}") as say:
        from autograder import check as judge
        from autograder.contract import task as contract

        try:
            names = [contract.load(chapter).task(function).name] if function else None
        except LookupError as error:
            raise UsageError(str(error)) from None
        options = {"full": full, "progress": say, "more": _more_facts(chapter, aot, mesh, say)}
        if path is None:
            report = judge.check_solution(chapter, names, **options)
        else:
            report = judge.check_notebook(path, chapter, names, **options)
    if path is not None:
        _remember(path, chapter, passed={result.name: result.verdict == "pass" for result in report.functions})
    from autograder.render import facts_table, word_in_json

    if as_json:
        rows = [{**row, "verdict": word_in_json(row["verdict"])} for row in report.to_json()["functions"]]
        print_json({**report.to_json(), "functions": rows})
    else:
        out().print(facts_table(report))
    if any(result.verdict == "needs_human" for result in report.functions):
        raise typer.Exit(FAULT)
    raise typer.Exit(0 if report.passed else SHORT)


def _more_facts(chapter: str, aot: bool, mesh: Mesh, say: Callable[[str], None]) -> list[Any]:
    more: list[Any] = []
    if aot:
        from autograder.learner.compiled import CompiledFacts

        more.append(CompiledFacts(chapter, say))
    if mesh is Mesh.real:
        from autograder.learner.hardware_check import measured_here

        more.append(measured_here(chapter, say))
    return more


def hint(chapter: ChapterName, function: FunctionName = None, notebook: NotebookFile = None) -> None:
    """Show one more hint for a function: for the first that does not pass yet, if you name none."""
    require_chapter(chapter)
    hints = read_hints(chapter)
    path = notebook or find_notebook(chapter) or _usual_place(chapter)
    known = recall(path, chapter)
    name = function or next((n for n in hints if not known.passed.get(n)), next(iter(hints)))
    if name not in hints:
        raise UsageError(f"there are no hints for {name!r} in {chapter}; there are for: {', '.join(hints)}")
    tiers = hints[name]
    shown = min(known.hints.get(name, 0) + 1, len(tiers))
    _remember(path, chapter, hints={name: shown})
    from rich.markdown import Markdown

    from autograder.render import WIDEST

    console = out()
    console.print(f"[bold]{name}[/]  hint {shown} of {len(tiers)}")
    console.print(Markdown(tiers[shown - 1]), width=min(console.width, WIDEST))
    more = f"`meshcraft hint {chapter} {name}` again shows the next one."
    last = f"That was the last one. The page `{chapter}` has the theory behind it."
    console.print(last if shown == len(tiers) else more, style="dim", markup=False)


def reset(
    chapter: ChapterName,
    function: FunctionName = None,
    notebook: NotebookFile = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Put the exercise back as it was, or one function of it. Asks first, and keeps a copy of what you have."""
    require_chapter(chapter, or_primer=True)
    path = require_notebook(chapter, notebook)
    fresh = _with_stub(path, chapter, function) if function else exercise_text(chapter)
    what = f"{function} in {path}" if function else str(path)
    if not yes:
        typer.confirm(f"Put {what} back as it was at the start?", abort=True)
    backup = _hidden(path) / "backups" / f"{path.stem}-{datetime.now():%Y%m%d-%H%M%S-%f}.ipynb"
    backup.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, backup)
    path.write_text(fresh, encoding="utf-8")
    out().print(f"put back; what you had is in {backup}", markup=False)


def find_notebook(chapter: str) -> Path | None:
    """The learner's notebook in the working folder."""
    places = (_usual_place(chapter), Path(f"{chapter}.ipynb"))
    return next((place for place in places if place.exists()), None)


def _usual_place(chapter: str) -> Path:
    return Path(chapter) / f"{chapter}.ipynb"


def require_notebook(chapter: str, given: Path | None) -> Path:
    """The notebook that was given, or the learner's.

    Raises:
        UsageError: there is none.
    """
    if given is not None:
        if given.is_dir():
            raise UsageError(f"{given} is a folder; name the notebook in it")
        if not given.is_file():
            raise UsageError(f"there is no notebook {given}")
        return given
    found = find_notebook(chapter)
    if found is None:
        raise UsageError(
            f"there is no {chapter}/{chapter}.ipynb here; `meshcraft start {chapter}` makes it, "
            "`--notebook FILE` names another one"
        )
    return found


def exercise_text(chapter: str) -> str:
    """The exercise as it is handed out: the committed one, else built from the solution."""
    from autograder.release.notebook import ROOT
    from autograder.release.notebook import exercise_text as built

    committed = ROOT / "exercises" / chapter / f"{chapter}.ipynb"
    return committed.read_text(encoding="utf-8") if committed.exists() else built(chapter)


class Progress(msgspec.Struct):
    """What is remembered of a chapter, by function: did it pass when it was last judged, how many hints were shown."""

    passed: dict[str, bool] = {}
    hints: dict[str, int] = {}


def recall(notebook: Path, chapter: str) -> Progress:
    """What is remembered, in a folder next to the notebook."""
    return _recall_all(notebook).get(chapter, Progress())


def _recall_all(notebook: Path) -> dict[str, Progress]:
    try:
        return msgspec.json.decode((_hidden(notebook) / "progress.json").read_bytes(), type=dict[str, Progress])
    except (OSError, msgspec.MsgspecError):
        return {}


def _remember(notebook: Path, chapter: str, **news: dict[str, Any]) -> None:
    """Keep it; a folder that cannot be written is no reason to fail."""
    every = _recall_all(notebook)
    known = every.setdefault(chapter, Progress())
    for kind, values in news.items():
        getattr(known, kind).update(values)
    with suppress(OSError):
        _hidden(notebook).mkdir(parents=True, exist_ok=True)
        (_hidden(notebook) / "progress.json").write_bytes(msgspec.json.encode(every))


def _hidden(notebook: Path) -> Path:
    return notebook.parent / ".meshcraft"


def _with_stub(path: Path, chapter: str, function: str) -> str:
    import nbformat

    from autograder.release.converters import notebook_text

    def cell_of(notebook: Any) -> Any:
        return next((c for c in notebook.cells if c.metadata.get("nbgrader", {}).get("grade_id") == function), None)

    stub = cell_of(nbformat.reads(exercise_text(chapter), as_version=4))
    if stub is None:
        raise UsageError(f"{chapter} has no function {function!r}")
    try:
        notebook = nbformat.read(path, as_version=4)
    except Exception as error:
        raise UsageError(f"{path} is not a notebook ({error}); put all of it back: meshcraft reset {chapter}") from None
    cell = cell_of(notebook)
    if cell is None:
        raise UsageError(f"{path} has lost the cell of {function}; put all of it back: meshcraft reset {chapter}")
    cell.source = stub.source
    return notebook_text(notebook)


def _chapter_row(name: str, title: str, summary: str) -> dict[str, Any]:
    path = find_notebook(name)
    passed = recall(path, name).passed if path else {}
    row = {"chapter": name, "title": title, "summary": summary, "started": path is not None}
    return {**row, "passed": sorted(n for n, done in passed.items() if done), "judged": sorted(passed)}


def _progress_text(row: dict[str, Any]) -> str:
    if not row["started"]:
        return f"[dim]meshcraft start {row['chapter']}[/]"
    return f"{len(row['passed'])} of {len(row['judged'])} pass" if row["judged"] else "started"

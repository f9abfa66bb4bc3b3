"""Shared terminal code of the commands: output, progress and errors."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, redirect_stdout
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from course.curriculum import CHAPTERS, OWN, PRIMER
from course.curriculum import chapter as find_chapter

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]
SHORT, USAGE, FAULT, INTERRUPTED = 1, 2, 3, 130
# The value of an option written as NAME=VALUE.
NAMED = re.compile(r"([A-Za-z_][\w]*)=(.*)", re.DOTALL)
AFTER_FULL = "free some space and run the same command again; nothing recorded so far is lost"


class UsageError(Exception):
    """A command received unusable input; the message explains the problem and the remedy."""


def out() -> Console:
    """The console for results."""
    return Console(highlight=False)


def show(*parts: Any) -> None:
    """Print results, without trailing padding if there is no terminal."""
    console = out()
    if console.is_terminal:
        for part in parts:
            console.print(part)
        return
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in capture.get().removesuffix("\n").split("\n")))


def table(*columns: str, gap: int = 2, right: Collection[str] = (), rule: bool = False) -> Table:
    """Create a table; columns in ``right`` are numeric, ``rule`` draws lines below the header and between sections.

    Names of functions and chapters stay whole, however narrow the terminal is.
    """
    new_table = Table(box=SIMPLE if rule else None, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0))
    new_table.header_style, new_table.show_header = "dim", any(columns)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in right else "left"
        new_table.add_column(column, justify=justify, overflow="fold", no_wrap=column in ("function", "chapter"))
    return new_table


def fits(made: Table) -> bool:
    """Return True if a table fits in the terminal without breaking a line in a cell."""
    return out().measure(made, options=out().options.update(max_width=10_000)).maximum <= out().width


def card_table(lines: dict[str, str]) -> Table:
    """Format a run card as a table, one row per label."""
    rows = table("", "")
    for label, text in lines.items():
        rows.add_row(Text(label, style="dim"), Text(text))
    return rows


def err() -> Console:
    """The console for progress and error messages."""
    return Console(stderr=True, highlight=False)


def print_json(data: Any) -> None:
    """Print one JSON object on standard output."""
    sys.stdout.write(json.dumps(_finite(data), indent=2, allow_nan=False) + "\n")


def _finite(data: Any) -> Any:
    """Replace non-finite numbers by text, since JSON cannot represent them."""
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data


def require_chapter(name: str, *, or_primer: bool = False) -> str:
    """Return the name if it is a chapter, or the primer if that is allowed.

    Raises:
        UsageError: There is no such chapter.
    """
    if or_primer and name == PRIMER.name:
        return name
    try:
        return find_chapter(name).name
    except LookupError as error:
        raise UsageError(str(error)) from None


def require_function(chapter: str, name: str) -> str:
    """Return the name if a chapter has such a function.

    Raises:
        UsageError: It has none, or there is no such chapter.
    """
    require_chapter(chapter)
    names = find_chapter(chapter).names
    if name in names:
        return name
    near = get_close_matches(name.lower(), names, 1)
    perhaps = f"is it {near[0]}? Its" if near else "its"
    raise UsageError(f"{chapter} has no function {name!r}; {perhaps} functions are: {', '.join(names)}")


def require_target(path: Path, option: str = "") -> None:
    """Require that a file can be written at a path given on the command line, by an option if it is named.

    Raises:
        UsageError: It is a folder, or in no folder.
    """
    subject = f"{option} {path}".strip()
    if path.is_dir():
        raise UsageError(f"{subject} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"{subject} cannot be written: there is no folder {path.parent}; make it first")


@contextmanager
def spinner(text: str, *, announced: str = "") -> Iterator[Callable[[str], None]]:
    """Show a spinner if there is a terminal; call the result to update its text.

    Without a terminal, print ``announced`` as one line on standard error instead.

    Anything the learner's code prints meanwhile goes to standard error: standard output is for results. Ctrl-C ends the
    command with one word.
    """
    console = err()
    with interruptible():
        if not console.is_terminal:
            if announced:
                console.print(announced, markup=False, soft_wrap=True)
            with redirect_stdout(sys.stderr):
                yield lambda message: None
            return
        # Inside the status context, where rich has replaced standard error by a stream that doesn't interfere with it.
        with console.status(escape(text)) as status, redirect_stdout(sys.stderr):
            yield lambda message: status.update(escape(f"{text}: {message}"))


@contextmanager
def interruptible() -> Iterator[None]:
    """On Ctrl-C, end the command with one word and status 130."""
    try:
        yield
    except KeyboardInterrupt:
        complain("interrupted")
        raise SystemExit(INTERRUPTED) from None


@contextmanager
def bar() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar per stage; call it with the stage, the number done and the total."""
    console = err()
    columns = (
        SpinnerColumn(finished_text=" "),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with interruptible(), Progress(*columns, console=console) as progress:
        stages: dict[str, Any] = {}

        def update(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = progress.add_task(stage, total=total)
            progress.update(stages[stage], completed=done, total=total)

        yield update


def complain(message: object) -> None:
    """Print an error message on standard error."""
    from autograder.render import plain

    err().print(f"meshcraft: {plain(message)}", style="red", markup=False, soft_wrap=True)


@contextmanager
def explained() -> Iterator[None]:
    """Turn expected errors into a sentence and an exit status."""
    try:
        yield
    except Exception as error:
        status = _status(error)
        if status is None or os.environ.get("MESHCRAFT_DEBUG"):
            raise
        full = isinstance(error, OSError)
        if isinstance(error, SyntaxError):
            complain(f"{error.filename}, line {error.lineno}: {error.msg}; correct it")
        else:
            complain(f"the disk is full ({error}); {AFTER_FULL}" if full else error)
        raise SystemExit(status) from None


USED_WRONGLY = {*"UsageError IntakeError CourseError BuildError SandboxUnavailable ChoiceError ChapterError".split()}


def _status(error: Exception) -> int | None:
    """The exit status of an error whose message is explanation enough; None for any other.

    By class name, because importing the modules that define them takes seconds.
    """
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FAULT
    if isinstance(error, SyntaxError) and any(entry.own for entry in CHAPTERS):
        return USAGE if Path(error.filename or "").is_relative_to(OWN) else None
    names = {kind.__name__ for kind in type(error).__mro__ if kind.__module__.startswith("autograder.")}
    if names & USED_WRONGLY:
        return USAGE
    return FAULT if names & {"LedgerError", "NbgraderError", "BridgeError"} else None

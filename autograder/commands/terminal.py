"""What the commands share: how they speak, show progress and fail."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from course.curriculum import PRIMER
from course.curriculum import chapter as find_chapter

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]
SHORT, USAGE, FAULT, INTERRUPTED = 1, 2, 3, 130
AFTER_FULL = "free some space and run the same command again, nothing recorded so far is lost"


class UsageError(Exception):
    """The command was given something that it cannot use; the message says what and what to do."""


def out() -> Console:
    """Where results go."""
    return Console(highlight=False)


def show(*parts: Any) -> None:
    """Print results; where no terminal shows them, without the blanks that fill up lines."""
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
    """A table; the columns in ``right`` are numbers, and ``rule`` draws lines below the head and between sections."""
    made = Table(box=SIMPLE if rule else None, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0))
    made.header_style, made.show_header = "dim", any(columns)
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def card_table(lines: dict[str, str]) -> Table:
    """A run card in words, by what each line says."""
    made = table("", "")
    for what, text in lines.items():
        made.add_row(Text(what, style="dim"), Text(text))
    return made


def err() -> Console:
    """Where progress and complaints go."""
    return Console(stderr=True, highlight=False)


def print_json(data: Any) -> None:
    """One JSON object on standard output."""
    sys.stdout.write(json.dumps(_finite(data), indent=2, allow_nan=False) + "\n")


def _finite(data: Any) -> Any:
    """The same data; JSON has no word for numbers that are not finite, so they become text."""
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data


def require_chapter(name: str, *, or_primer: bool = False) -> str:
    """The name, if a chapter has it, or the primer where that will do.

    Raises:
        UsageError: none has.
    """
    if or_primer and name == PRIMER.name:
        return name
    try:
        return find_chapter(name).name
    except LookupError as error:
        raise UsageError(str(error)) from None


@contextmanager
def spinner(text: str) -> Iterator[Callable[[str], None]]:
    """Show that something is going on, where somebody may be watching; call it to say what.

    What a learner's code prints meanwhile goes to standard error: standard output is for results. Ctrl-C ends the
    command with one word.
    """
    console = err()
    with interruptible():
        if not console.is_terminal:
            with redirect_stdout(sys.stderr):
                yield lambda message: None
            return
        # Inside of the status, where rich has made standard error one that does not mix with it.
        with console.status(escape(text)) as status, redirect_stdout(sys.stderr):
            yield lambda message: status.update(escape(f"{text}: {message}"))


@contextmanager
def interruptible() -> Iterator[None]:
    """End the command with one word and status 130 where somebody presses Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        complain("interrupted")
        raise SystemExit(INTERRUPTED) from None


@contextmanager
def bar() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar for each stage; call it with the stage, and how many of how many are done."""
    console = err()
    columns = (
        SpinnerColumn(finished_text=" "),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with interruptible(), Progress(*columns, console=console) as progress:
        stages: dict[str, Any] = {}

        def update(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = progress.add_task(stage, total=total)
            progress.update(stages[stage], completed=done, total=total)

        yield update


def complain(message: object) -> None:
    """Say on standard error what is wrong."""
    from autograder.render import plain

    err().print(f"meshcraft: {plain(message)}", style="red", markup=False, soft_wrap=True)


@contextmanager
def explained() -> Iterator[None]:
    """Turn errors that people can do something about into a sentence and an exit status."""
    try:
        yield
    except Exception as error:
        status = _status(error)
        if status is None or os.environ.get("MESHCRAFT_DEBUG"):
            raise
        full = isinstance(error, OSError)
        complain(f"the disk is full ({error}); {AFTER_FULL}" if full else error)
        raise SystemExit(status) from None


def _status(error: Exception) -> int | None:
    """The exit status of an error that is explained by its message; None for one that is not.

    By class name, because importing the modules that define them takes seconds.
    """
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FAULT
    names = {kind.__name__ for kind in type(error).__mro__ if kind.__module__.startswith("autograder.")}
    if names & {"UsageError", "IntakeError", "CourseError", "BuildError", "SandboxUnavailable"}:
        return USAGE
    return FAULT if names & {"LedgerError", "NbgraderError", "BridgeError"} else None

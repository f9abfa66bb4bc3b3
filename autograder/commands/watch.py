"""`meshcraft watch`: judges what changed whenever the notebook, or its paired script, is saved."""

from __future__ import annotations

import ast
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from rich.live import Live
from rich.text import Text

from autograder import check as judge
from autograder.commands.hints import read_hints, show_hint
from autograder.commands.learner import STATES, chapter_row, function_states, show_functions
from autograder.commands.notebooks import back_up
from autograder.commands.terminal import complain, out, show
from autograder.contract.task import load
from autograder.contract.verdict import PASS, Result
from autograder.grading.inside.intake import IntakeError, Notebook, read_notebook
from autograder.learner.changes import Fingerprint, fingerprints
from autograder.learner.script_pairing import HalfWritten, script_text, with_script
from autograder.progress import next_function, recall, remember
from autograder.release.converters import grade_id_of, notebook_text
from autograder.render import WORDS, facts_table
from course.files import write_atomically

LOOK_S, SETTLED_S = 0.2, 0.1
KEYS = {"h": "hint", "l": "list", "p": "profile", "n": "next", "a": "check all", "q": "quit"}
# A file's state: modification time, size and inode; None if there is no file.
Stamp = tuple[int, int, int] | None


class Watch:
    """One chapter's notebook, its paired script if there is one, and the state of each function.

    Attributes:
        current: The function that keys apply to.
        busy: The current activity, for the status line.
    """

    def __init__(self, chapter: str, path: Path, script: Path):
        self.chapter, self.path, self.script = chapter, path, script
        self.names = list(read_hints(chapter))
        self.current, self.busy = self.names[0], ""
        self.stamps = self._stamps()
        self.seen: dict[str, Fingerprint] = {}
        self.last_message = ""
        self.refresh: Callable[[], Any] = lambda: None

    def pair(self) -> None:
        """Sync notebook and script at the start: the more recently saved one wins; the other is backed up."""
        if not self.script.exists():
            self._write(self.script, script_text(nbformat.read(self.path, as_version=4)))
            out().print(f"wrote {self.script}: edit that, and the notebook follows", markup=False)
            return
        self.stamps = self._stamps()
        later, other = sorted((self.path, self.script), key=lambda path: -path.stat().st_mtime_ns)
        before, backup = other.read_bytes(), back_up(other)
        self._follow(later)
        if other.read_bytes() == before:
            backup.unlink()
        else:
            out().print(
                f"{other} now follows {later}, which was saved later; its previous version is in {backup}", markup=False
            )

    def saved(self) -> bool:
        """Return True if a file was written since the last call and the write has finished; then call ``look``."""
        stamps = self._stamps()
        if stamps == self.stamps:
            return False
        time.sleep(SETTLED_S)
        return self._stamps() == stamps

    def look(self, *, everything: bool = False) -> None:
        """Judge what changed since the last look, then whatever depends on it."""
        notebook = self._read()
        if notebook is None:
            return
        prints = fingerprints(self.chapter, notebook.cells, self.names)
        known, states = recall(self.path, self.chapter), self.states
        written = [name for name in self.names if states[name] != "not started"]
        first, before, self.seen = not self.seen, self.seen, prints
        stale = [
            name
            for name in written
            if everything or known.prints.get(name) != prints[name].all or (first and not known.passed.get(name))
        ]
        own = stale if first or everything else [n for n in stale if before[n].own != prints[n].own]
        if own:
            self.current = own[-1]
        results = self._judge(own, prints)
        if all(result.verdict == PASS for result in results):
            results += self._judge([name for name in stale if name not in own], prints)
        if not results and not first:
            out().print("saved; no function has changed", style="dim")
        self._show(results, own)

    @property
    def states(self) -> dict[str, str]:
        return function_states(self.chapter, self.path)

    def _stamps(self) -> dict[Path, Stamp]:
        def stamp(path: Path) -> Stamp:
            try:
                stat = path.stat()
            except OSError:
                return None
            return stat.st_mtime_ns, stat.st_size, stat.st_ino

        return {path: stamp(path) for path in (self.path, self.script)}

    def _read(self) -> Notebook | None:
        """Read the notebook after syncing it with the paired file; None if there is nothing to read yet."""
        before, self.stamps = self.stamps, self._stamps()
        changed = [path for path, stamp in self.stamps.items() if stamp != before[path]]
        try:
            if self.script in changed and self.stamps[self.script]:
                self._follow(self.script)
            elif self.stamps[self.script] and self.path in changed:
                self._follow(self.path)
            self.last_message = ""
            return read_notebook(self.path)
        except (OSError, ValueError, IntakeError, HalfWritten) as error:
            self._say_once(f"{self._half_written(error)}; waiting until it is saved again")
            return None

    def _half_written(self, error: Exception) -> str:
        if isinstance(error, HalfWritten):
            return f"{self.script}: {error}"
        missing = next((path for path in (self.path, self.script) if not self.stamps.get(path)), None)
        return f"{self.path} is gone" if missing == self.path else f"{self.path} cannot be read yet ({error})"

    def _say_once(self, message: str) -> None:
        if message != self.last_message:
            complain(message)
        self.last_message = message

    def _follow(self, saved: Path) -> None:
        """Write the saved content to the other file, unless it already has it."""
        notebook = nbformat.read(self.path, as_version=4)
        if saved == self.script:
            target, text = self.path, notebook_text(with_script(notebook, self.script.read_text(encoding="utf-8")))
            same = text == notebook_text(notebook)
        else:
            target, text = self.script, script_text(notebook)
            same = text == self.script.read_text(encoding="utf-8")
        if not same:
            self._write(target, text)

    def _write(self, path: Path, text: str) -> None:
        write_atomically(path, text)
        self.stamps = {**self.stamps, path: self._stamps()[path]}

    def _judge(self, names: list[str], prints: dict[str, Fingerprint]) -> list[Result]:
        if not names:
            return []
        with self.doing(f"judging {', '.join(names)}") as say:
            try:
                report = judge.check_notebook(self.path, self.chapter, names, progress=say)
            except (IntakeError, OSError) as error:
                self._say_once(f"{error}; waiting until it is saved again")
                return []
        remember(self.path, self.chapter, report.functions, {name: prints[name].all for name in names})
        return list(report.functions)

    def _show(self, results: list[Result], own: list[str]) -> None:
        """Show failures, and facts of the edited functions; for all others only whether they pass."""
        short = [result for result in results if result.verdict != PASS]
        if short and self.current not in [result.name for result in short]:
            self.current = short[0].name
        for result in results:
            if result.name == self.current or (result.name in own and len(own) <= 2):
                out().print(facts_table(result), crop=False)
                continue
            mark, colour = STATES["passes" if result.verdict == PASS else "fails"]
            missed = ", ".join(fact.name for fact in result.missed)
            outcome = f"{WORDS[result.verdict]}{': ' if missed else ''}{missed}"
            out().print(Text.assemble((mark, colour), f" {result.name}  ", (outcome, "dim")))
        if results and not short:
            following = self._following()
            next_text = f"next: {following}" if following else f"all functions of {self.chapter} pass"
            profile = (
                ""
                if load(self.chapter).task(self.current).at_scale is None
                else f"; press p for the profile of {self.current}"
            )
            out().print(f"{next_text}{' (press n)' if following else ''}{profile}", style="bold", markup=False)

    def _following(self, names: list[str] | None = None) -> str:
        states = self.states
        return next_function(names or self.names, {name: state == "passes" for name, state in states.items()})

    @contextmanager
    def doing(self, what: str) -> Iterator[Callable[[str], None]]:
        """Show the current activity in the status line; call the result to add detail."""

        def say(detail: str = "") -> None:
            self.busy = f"{what}: {detail}" if detail else what
            self.refresh()

        say()
        try:
            yield say
        finally:
            self.busy = ""
            self.refresh()

    def press(self, key: str) -> None:
        """Handle a key; ignore unknown ones."""
        if key == "h":
            show_hint(self.path, self.chapter, self.current if self.states[self.current] != "passes" else None)
        elif key == "l":
            show_functions(chapter_row(self.chapter))
        elif key == "p":
            self._profile()
        elif key == "n":
            self._next()
        elif key == "a":
            self.look(everything=True)

    def _profile(self) -> None:
        from autograder.learner.profile import profile_notebook

        with self.doing(f"profiling {self.current}") as say:
            profile = profile_notebook(self.path, self.chapter, self.current, progress=say)
        if profile.problem is None:
            show(*profile.tables())
        else:
            complain(repr(profile))

    def _next(self) -> None:
        name = self._following()
        if self.states[self.current] != "passes":  # skip it for now, and come back to it at the end
            at = self.names.index(self.current) + 1
            name = self._following([*self.names[at:], *self.names[:at]])
        if not name:
            out().print(f"all functions of {self.chapter} pass", style="bold green", markup=False)
            return
        self.current = name
        notebook = nbformat.read(self.path, as_version=4)
        cells = list(map(grade_id_of, notebook.cells))
        at = cells.index(name) if name in cells else 0
        lines = [line for cell in notebook.cells[:at] for line in cell.source.splitlines() if line.startswith("## ")]
        where = f"under “{lines[-1].removeprefix('## ').replace('`', '')}”" if lines else ""
        if self.script.exists():
            script = self.script.read_text(encoding="utf-8").splitlines()
            numbers = [number for number, line in enumerate(script, 1) if line.startswith(f"def {name}(")]
            where += "".join(f", {self.script}:{number}" for number in numbers[:1])
        out().print(Text.assemble((name, "bold"), "  ", (where, "dim")))
        out().print(_summary(notebook.cells[at].source), markup=False)

    def status(self) -> Text:
        """Two lines at the bottom of the screen: the state of each function, and the keys."""
        states = self.states
        passed = sum(state == "passes" for state in states.values())
        line = Text(f"{self.chapter} {passed}/{len(states)} ", style="bold", no_wrap=True, overflow="ellipsis")
        for state in states.values():
            line.append(*STATES[state])
        line.append(f"  {self.busy or self.current}", style="cyan" if self.busy else "bold")
        line.append("\n")
        for key, action in KEYS.items():
            line.append(f"{key} ", style="bold").append(f"{action}   ", style="dim")
        return line


def _summary(source: str) -> str:
    """The first line of the docstring in a function's cell."""
    try:
        first = next(node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    except (SyntaxError, StopIteration):
        return ""
    return (ast.get_docstring(first) or "").partition("\n")[0]


@contextmanager
def keys(pressed: queue.Queue[str]) -> Iterator[None]:
    """Put each key pressed into the queue; q interrupts the current activity as Ctrl-C does."""
    import termios
    import tty

    terminal, main = sys.stdin.fileno(), threading.main_thread().ident
    assert main is not None

    def read() -> None:
        while data := os.read(terminal, 64):
            for key in [] if data.startswith(b"\x1b") else data.decode(errors="replace"):
                if key == "q":
                    break
                pressed.put(key)
            else:
                continue
            break
        signal.pthread_kill(main, signal.SIGINT)

    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    threading.Thread(target=read, daemon=True).start()
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


@contextmanager
def screen(watched: Watch) -> Iterator[queue.Queue[str]]:
    """Show a status line and read keys on a terminal; elsewhere print plain lines."""
    console, pressed = out(), queue.Queue()
    if not (console.is_terminal and sys.stdin.isatty()) or console.is_dumb_terminal:
        yield pressed
        return
    with (
        keys(pressed),
        Live(console=console, auto_refresh=False, transient=True, get_renderable=watched.status) as live,
    ):
        watched.refresh = live.refresh
        live.refresh()
        yield pressed


def run(chapter: str, path: Path, *, script: bool) -> None:
    """Watch until q or Ctrl-C."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, stop)
    script_path = path.with_suffix(".py")
    watched = Watch(chapter, path, script_path)
    try:
        if script or script_path.exists():
            watched.pair()
        judge.executor().start_early()
        judge.tracer(chapter).start_early()
        out().print(
            f"watching {path}{f' and {script_path}' if script_path.exists() else ''}: save it to have it judged",
            markup=False,
        )
        with screen(watched) as pressed:
            load(chapter)
            watched.look()
            watched.refresh()
            _loop(watched, pressed)
    except KeyboardInterrupt:
        out().print("stopped watching", style="dim")


def _loop(watched: Watch, pressed: queue.Queue[str]) -> None:
    size = out().size
    while True:
        try:
            key = pressed.get(timeout=LOOK_S)
        except queue.Empty:
            key = ""
        try:
            if key:
                watched.press(key)
            elif watched.saved():
                watched.look()
            elif size != (size := out().size):
                pass
            else:
                continue
        except Exception as error:  # whatever the error, the next save may fix it
            complain(f"{type(error).__name__}: {error}")
        watched.refresh()

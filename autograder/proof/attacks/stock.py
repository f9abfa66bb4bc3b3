"""The control: the same attacks on unmodified nbgrader, which runs a notebook and trusts its results.

``python -m autograder.proof.attacks.stock COURSE STUDENT`` grades one submission in a container that isolates
this machine from an attack, except for the course folder: nbgrader itself isolates nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from autograder.grading.nbgrader.course import open_gradebook
from autograder.grading.nbgrader.keys import digest
from autograder.grading.outside.backends import tool
from autograder.proof.attacks.canaries import search
from autograder.proof.attacks.declared import CHAPTER, Attack
from autograder.proof.attacks.fixtures import NEIGHBOUR, prepare
from autograder.proof.attacks.suite import handed_in, written
from autograder.proof.demo import HERE as DEMO
from autograder.release.converters import course_config, run_nbgrader
from course.curriculum import ROOT

SECONDS, CELL_SECONDS = 300, 120


class Control(msgspec.Struct, frozen=True):
    """The result of an attack on stock nbgrader.

    Attributes:
        points: Its points for the attacked functions; None if its autograde step failed.
        official: Official grading's points for them.
        canaries: Canaries in the output that a student can see.
    """

    name: str
    points: float | None
    official: float
    canaries: tuple[str, ...]

    @property
    def let_through(self) -> bool:
        return bool(self.canaries) or (self.points or 0.0) > self.official + 0.005


def run_stock(
    attacks: list[Attack],
    official: dict[str, float],
    folder: Path,
    *,
    workers: int = 2,
    on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> list[Control]:
    """Try stock nbgrader on each attack that allows it.

    Args:
        attacks: The attacks; those with a reason against it are left out.
        official: Official grading's points for the attacked functions, by attack.
        folder: The working folder; see ``suite.workplace``.
        workers: Number of parallel workers.
        on_progress: Called with the stage, the number done, and the total.
    """
    if not Path(tool("bwrap")).is_absolute():
        raise RuntimeError("the control needs bubblewrap: stock nbgrader would run the attacks on this machine itself")
    attacks = [attack for attack in attacks if attack.control is True]
    course = prepare(folder / "stock", attacks)
    _require_honest_grade(course)
    controls = []
    with ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(_try, attack, course, official.get(attack.name, 0.0)) for attack in attacks]
        for done, future in enumerate(as_completed(running), 1):
            controls.append(future.result())
            on_progress("stock nbgrader", done, len(attacks))
    return sorted(controls, key=lambda control: control.name)


def _require_honest_grade(template: Path) -> None:
    """Make sure that stock nbgrader works in its container: a control that fails at everything shows nothing."""
    with _graded(template, "honest", [DEMO / "submitted" / "right"]) as (own, stderr):
        if not (earned := _earned(own, "right", ("shard_params",))):
            last = stderr.strip().splitlines()[-1:] or ["no error output"]
            raise RuntimeError(f"the control does not work here: an honest notebook earned {earned}; {last[0]}")


def _try(attack: Attack, template: Path, official: float) -> Control:
    submissions = [template / "submitted" / name for name in (attack.name, NEIGHBOUR)]
    with _graded(template, attack.name, submissions) as (own, _):
        submission = handed_in(own, attack)
        released = (own / "release" / CHAPTER / f"{CHAPTER}.ipynb").read_text()
        output = written(own / "autograded" / attack.name, links=False)
        canaries = search(output, attack, submission, digest(submission), released)
        return Control(attack.name, _earned(own, attack.name, attack.functions), official, tuple(canaries))


@contextmanager
def _graded(template: Path, name: str, submitted: list[Path]) -> Iterator[tuple[Path, str]]:
    """A copy of the course in which stock nbgrader graded the first of these submissions, and its error output."""
    own = template.parent / f"stock-{name}"
    shutil.copytree(template, own, ignore=shutil.ignore_patterns("submitted", "nbgrader_config.py"))
    for folder in submitted:
        if folder.exists():
            shutil.copytree(folder, own / "submitted" / folder.name, symlinks=True)
    stderr = ""
    with suppress(subprocess.TimeoutExpired):
        command = _contained(own, submitted[0].name)
        stderr = subprocess.run(command, capture_output=True, timeout=SECONDS).stderr.decode(errors="replace")
    yield own, stderr
    shutil.rmtree(own, ignore_errors=True)


def _contained(course: Path, student: str) -> list[str]:
    """nbgrader's autograde step, able to write only to the course folder."""
    inside = ["--unshare-pid", "--unshare-ipc", "--unshare-net", "--cap-drop", "ALL", "--die-with-parent"]
    files = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--tmpfs", "/dev/shm"]
    for path in (sys.base_prefix, sys.prefix, ROOT):  # which may be below the temporary folder
        own = os.path.realpath(path)
        files += ["--ro-bind", own, own]
    home = ["--setenv", "HOME", "/tmp", "--setenv", "TMPDIR", "/tmp", "--setenv", "XDG_RUNTIME_DIR", "/tmp"]
    command = [sys.executable, "-m", "autograder.proof.attacks.stock", str(course), student]
    return [tool("bwrap"), *inside, *files, "--bind", str(course), str(course), *home, *command]


def _earned(course: Path, student: str, functions: tuple[str, ...]) -> float | None:
    from nbgrader.api import MissingEntry

    with open_gradebook(course) as gradebook:
        try:
            grades = [gradebook.find_grade(f"check-{name}", CHAPTER, CHAPTER, student) for name in functions]
        except MissingEntry:
            return None
        scores: list[Any] = [grade.auto_score for grade in grades]
        return None if None in scores else round(sum(scores), 2)


def grade_as_nbgrader_does(course: Path, student: str) -> None:
    """nbgrader's own autograde step with its default settings, except for the stub's text and the time limit."""
    from nbgrader.converters import Autograde

    config = course_config(course, CHAPTER, student)
    config.ClearSolutions.code_stub = {"python": "raise NotImplementedError()"}
    config.Execute.timeout = CELL_SECONDS
    config.Autograde.exclude_overwriting = {}
    run_nbgrader(Autograde, config)


if __name__ == "__main__":
    grade_as_nbgrader_does(Path(sys.argv[1]), sys.argv[2])

"""The control: the same attacks on nbgrader as it comes, which runs a notebook and believes what it says.

``python -m autograder.proof.attacks.stock COURSE STUDENT`` grades one submission, in a container that keeps what an
attack does away from this machine, and away from everything but its course folder: nbgrader itself keeps nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autograder.grading.nbgrader.ledger import digest
from autograder.grading.outside.backends import tool
from autograder.proof.attacks.canaries import search
from autograder.proof.attacks.fixtures import CHAPTER, NEIGHBOUR, Attack, prepare
from autograder.proof.attacks.suite import handed_in
from autograder.proof.demo.__main__ import HERE as DEMO
from autograder.release.converters import course_config, nbgrader_quiet, run_nbgrader
from autograder.release.notebook import ROOT

SECONDS, CELL_SECONDS = 300, 90


@dataclass(frozen=True)
class Control:
    """What stock nbgrader made of an attack.

    Attributes:
        points: What it gave the attacked functions; None where its autograde step failed.
        official: What official grading gave them.
        canaries: What a student could see of its output and must not.
    """

    name: str
    points: float | None
    official: float
    canaries: tuple[str, ...]

    @property
    def let_through(self) -> bool:
        return bool(self.canaries) or (self.points or 0.0) > self.official + 0.005

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Control:
        return cls(**{**data, "canaries": tuple(data["canaries"])})


def tried(attacks: list[Attack]) -> list[Attack]:
    """The attacks that stock nbgrader is tried on."""
    return [attack for attack in attacks if not attack.control]


def run_stock(
    attacks: list[Attack],
    official: dict[str, float],
    folder: Path,
    *,
    workers: int = 2,
    on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> list[Control]:
    """Try stock nbgrader on each attack that says so.

    Args:
        attacks: The attacks; those with a reason against it are left out.
        official: What official grading gave the attacked functions, by attack.
        folder: Where to work; see ``suite.workplace``.
        workers: How many at once.
        on_progress: Called with the stage, and how many of how many are done.
    """
    if not Path(tool("bwrap")).is_absolute():
        raise RuntimeError("the control needs bubblewrap: stock nbgrader would run the attacks on this machine itself")
    attacks = tried(attacks)
    course = prepare(folder / "stock", attacks)
    _require_honest_grade(course)
    found = []
    with ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(_try, attack, course, official.get(attack.name, 0.0)) for attack in attacks]
        for done, future in enumerate(as_completed(running), 1):
            found.append(future.result())
            on_progress("stock nbgrader", done, len(attacks))
    return sorted(found, key=lambda control: control.name)


def _require_honest_grade(template: Path) -> None:
    """Make sure that stock nbgrader works in its container: a control that fails at everything shows nothing."""
    own = template.parent / "stock-honest"
    shutil.copytree(template, own, ignore=shutil.ignore_patterns("submitted", "nbgrader_config.py"))
    shutil.copytree(DEMO / "submitted" / "right", own / "submitted" / "right")
    run = subprocess.run(_contained(own, "right"), capture_output=True, text=True, timeout=SECONDS)
    earned = _earned(own, "right", ("shard_params",))
    if not earned:
        last = run.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise RuntimeError(f"the control does not work here: an honest notebook earned {earned}; {last[0]}")
    shutil.rmtree(own, ignore_errors=True)


def _try(attack: Attack, template: Path, official: float) -> Control:
    own = template.parent / f"stock-{attack.name}"
    others = shutil.ignore_patterns("submitted", "nbgrader_config.py")
    shutil.copytree(template, own, ignore=others)
    for name in (attack.name, NEIGHBOUR):
        theirs = template / "submitted" / name
        if theirs.exists():
            shutil.copytree(theirs, own / "submitted" / name, symlinks=True)
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(_contained(own, attack.name), capture_output=True, timeout=SECONDS)
    output = "\n".join(
        path.read_text(encoding="utf-8", errors="replace")
        for path in sorted((own / "autograded" / attack.name).rglob("*"))
        if path.is_file() and not path.is_symlink()
    )
    submission = handed_in(own, attack)
    released = (own / "release" / CHAPTER / f"{CHAPTER}.ipynb").read_text()
    canaries = search(output, attack, submission, digest(submission), released)
    control = Control(attack.name, _earned(own, attack.name, attack.functions), official, tuple(canaries))
    shutil.rmtree(own, ignore_errors=True)
    return control


def _contained(course: Path, student: str) -> list[str]:
    """nbgrader's autograde step where it can write to the course folder and to nothing else."""
    inside = ["--unshare-pid", "--unshare-ipc", "--unshare-net", "--cap-drop", "ALL", "--die-with-parent"]
    files = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--tmpfs", "/dev/shm"]
    for own in (sys.base_prefix, sys.prefix, str(ROOT)):  # which may lie below the temporary folder
        files += ["--ro-bind", own, own]
    home = ["--setenv", "HOME", "/tmp", "--setenv", "TMPDIR", "/tmp", "--setenv", "XDG_RUNTIME_DIR", "/tmp"]
    command = [sys.executable, "-m", "autograder.proof.attacks.stock", str(course), student]
    return [tool("bwrap"), *inside, *files, "--bind", str(course), str(course), *home, *command]


def _earned(course: Path, student: str, functions: tuple[str, ...]) -> float | None:
    from nbgrader.api import Gradebook, MissingEntry

    with nbgrader_quiet(), Gradebook(f"sqlite:///{course / 'gradebook.db'}") as gradebook:
        try:
            grades = [gradebook.find_grade(f"check-{name}", CHAPTER, CHAPTER, student) for name in functions]
        except MissingEntry:
            return None
        scores: list[Any] = [grade.auto_score for grade in grades]
        return None if None in scores else round(sum(scores), 2)


def grade_as_nbgrader_does(course: Path, student: str) -> None:
    """nbgrader's own autograde step with its own settings, but for the stub's text and the time limit."""
    from nbgrader.converters import Autograde

    config = course_config(course, CHAPTER, student)
    config.ClearSolutions.code_stub = {"python": "raise NotImplementedError()"}
    config.Execute.timeout = CELL_SECONDS
    config.Autograde.exclude_overwriting = {}
    run_nbgrader(Autograde, config)


if __name__ == "__main__":
    grade_as_nbgrader_does(Path(sys.argv[1]), sys.argv[2])

"""Grade every attack through the real pipeline, and check everything that a student could see afterwards."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import psutil

from autograder.contract.verdict import Report, Result
from autograder.grading.inside.launch import Limits, prctl
from autograder.grading.nbgrader.batch import NOT_BOOKED, grade_course
from autograder.grading.nbgrader.booking import model_answers
from autograder.grading.nbgrader.course import open_gradebook, open_ledger
from autograder.grading.nbgrader.export import grades_csv, overview
from autograder.grading.nbgrader.feedback import write_feedback
from autograder.grading.nbgrader.jobs import Job
from autograder.grading.nbgrader.pools import NewPool, local_pool
from autograder.proof.attacks.canaries import IN_VARIABLE, VARIABLE, search
from autograder.proof.attacks.declared import Attack
from autograder.proof.attacks.fixtures import prepare

PR_SET_CHILD_SUBREAPER = 36
ENOUGH = 16 << 20
# Lower than a class gets, so that attacks that hit a limit end soon.
LIMITS = Limits(wall_s=45.0, cpu_s=10)


class Row(msgspec.Struct, frozen=True):
    """The result of one attack.

    Attributes:
        found: The verdicts of the attacked functions; one word if they agree.
        points: Their total points.
        canaries: Canaries that a student could see.
        denied: Actions that the sandbox refused and reported.
        problem: Any other problem, such as a feedback page that could not be written.
    """

    name: str
    group: str
    says: str
    expected: str
    found: str
    points: float
    expected_points: float | None
    canaries: tuple[str, ...]
    denied: tuple[str, ...]
    seconds: float
    messages: tuple[str, ...]
    problem: str = ""

    @property
    def withstood(self) -> bool:
        """True if the grader withstood the attack."""
        right = self.expected_points is None or abs(self.points - self.expected_points) < 0.005
        return self.found == self.expected and right and not self.canaries and not self.problem


class Outcome(msgspec.Struct, frozen=True):
    """A row for each attack, and everything that all of them together left behind."""

    rows: tuple[Row, ...]
    left: tuple[str, ...]

    @property
    def withstood(self) -> bool:
        return not self.left and all(row.withstood for row in self.rows)


def run_suite(
    attacks: list[Attack],
    level: str,
    *,
    workers: int = 2,
    on_progress: Callable[..., None] = lambda stage, done, total: None,
) -> Outcome:
    """Grade the attacks as one class in one sandbox, write feedback, and search everything that a student may see."""
    attacks = [attack for attack in attacks if not attack.backends or level in attack.backends]
    seconds: dict[str, float] = {}
    with workplace() as folder, watched() as left:
        course = prepare(folder / "course", attacks)
        before = untouchable(course)
        reports, unwritten = {}, {}
        for chapter in sorted({attack.chapter for attack in attacks}):
            pool = timed(local_pool(workers), seconds)
            graded = grade_course(course, chapter, level=level, limits=LIMITS, on_progress=on_progress, new_pool=pool)
            reports |= {report.student: report for report in graded}
            unwritten |= _write_pages(course, chapter, len(graded), on_progress)
        left += [f"changed: {name}" for name in changed(before, untouchable(course))]
        left += [f"left in scratch: {path.name}" for path in (folder / "tmp").iterdir()]
        visible = {chapter: _VisibleOutput(course, chapter) for chapter in {attack.chapter for attack in attacks}}
        rows = []
        for number, attack in enumerate(attacks, 1):
            report, problem = reports.get(attack.name), unwritten.get(attack.name, "")
            rows.append(_row(attack, report, visible[attack.chapter], problem, seconds.get(attack.name, 0.0)))
            on_progress("searching", number, len(attacks))
    return Outcome(tuple(rows), tuple(left))


def _write_pages(course: Path, chapter: str, total: int, on_progress: Callable[..., None]) -> dict[str, str]:
    """Write everyone's feedback; return the reason for each missing page, by student."""
    pages = count(1)
    return write_feedback(course, chapter, lambda _: on_progress("feedback", next(pages), total))[1]


def _row(attack: Attack, report: Report | None, visible: _VisibleOutput, problem: str, seconds: float) -> Row:
    results = [result for result in report.functions if result.name in attack.functions] if report else []
    verdicts = ", ".join(sorted({result.verdict for result in results})) or "no verdict"
    notes = report.notes if report else ()
    return Row(
        name=attack.name,
        group=attack.group,
        says=attack.says,
        expected=attack.verdict,
        found=verdicts,
        points=round(sum(result.points for result in results), 2),
        expected_points=attack.points,
        canaries=tuple(visible.canaries(attack, report)),
        denied=tuple(dict.fromkeys(call for result in results for call in result.denied)),
        seconds=round(seconds, 1),
        messages=tuple(dict.fromkeys(map(_message, results))),
        problem="; ".join(filter(None, [problem, *(note for note in notes if NOT_BOOKED in note)])),
    )


def _message(result: Result) -> str:
    """The message that a learner reads first: the result's own, or the first failed fact's."""
    failed = (f"{fact.name}: {fact.message}" for fact in result.missed)
    return result.message or next(failed, "")


class _VisibleOutput:
    """Everything that students may see of a graded course, by student."""

    def __init__(self, course: Path, chapter: str):
        self.course = course
        self.released = (course / "release" / chapter / f"{chapter}.ipynb").read_text()
        self.models = [*model_answers(course, chapter).values()]
        with open_ledger(course) as ledger:
            self.digests = {entry.student: entry.submission for entry in ledger.status(chapter)}
        self.lines = {row["student"]: json.dumps(row) for row in overview(course, chapter)}
        for line in grades_csv(course, [chapter]).splitlines():
            for name in self.lines:
                if f",{name}," in line:
                    self.lines[name] += line
        self.comments = _comments(course, chapter)

    def canaries(self, attack: Attack, report: Report | None) -> list[str]:
        parts = [json.dumps(report.to_json(), ensure_ascii=False) if report else ""]
        parts += [self.lines.get(attack.name, ""), self.comments.get(attack.name, "")]
        parts += [written(self.course / "feedback" / attack.name)]
        # This copy has the model answer for graders, which no student sees; everything else in it is searched as well.
        parts += [_without(written(self.course / "autograded" / attack.name), self.models)]
        digest = self.digests.get(attack.name, "")
        return search("\n".join(parts), attack, handed_in(self.course, attack), digest, self.released)


def _without(text: str, models: Iterable[str]) -> str:
    """The text of notebooks without the cells that are for graders."""
    for model in models:
        lines = json.dumps(model, ensure_ascii=False)[1:-1].split("\\n")
        for line in filter(None, lines):
            text = text.replace(line, "")
    return text


def written(folder: Path, *, links: bool = True) -> str:
    """The concatenated text of all files in a folder, including linked files."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and (links or not path.is_symlink())]
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)


def _comments(course: Path, chapter: str) -> dict[str, str]:
    with open_gradebook(course) as gradebook:
        return {
            str(submission.student.id): "\n".join(
                f"{comment.auto_comment} {comment.manual_comment}"
                for notebook in submission.notebooks
                for comment in notebook.comments
            )
            for submission in gradebook.assignment_submissions(chapter)
        }


def timed(pool: NewPool, seconds: dict[str, float]) -> NewPool:
    """The same pool; it records how long each student's grading took."""

    def make(alone: bool) -> tuple[Executor, int]:
        executor, width = pool(alone)
        submit = executor.submit

        def timed_submit(function: Any, job: Job) -> Any:
            begin, future = time.monotonic(), submit(function, job)
            future.add_done_callback(lambda _: seconds.update({job.student: time.monotonic() - begin}))
            return future

        executor.submit = timed_submit  # type: ignore[method-assign]
        return executor, width

    return make


def contents(path: Path) -> bytes:
    """The first bytes of a regular file; empty for anything else, such as a link or a pipe."""
    with suppress(OSError):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                return file.read(ENOUGH)
    return b""


def handed_in(course: Path, attack: Attack) -> bytes:
    """The concatenated submitted notebooks, whatever their names."""
    folder = course / "submitted" / attack.name / attack.chapter
    files = sorted(folder.glob("*.ipynb")) if not folder.is_symlink() else []
    return b"\n".join(map(contents, files))


def untouchable(course: Path) -> dict[str, str]:
    """The hashes of all files in the course folder that grading itself does not write."""
    own = ("autograded/", "feedback/", "gradebook.db", ".meshcraft/ledger", ".meshcraft/lock", ".meshcraft/staging")
    hashes = {}
    for path in sorted(course.rglob("*")):
        name = str(path.relative_to(course))
        if path.is_symlink():
            hashes[name] = f"link to {os.readlink(path)}"
        elif path.is_file() and not name.startswith(own):
            hashes[name] = f"{path.stat().st_size} bytes: {hashlib.sha256(contents(path)).hexdigest()}"
    return hashes


def changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return sorted(name for name in {*before, *after} if before.get(name) != after.get(name))


@contextmanager
def watched() -> Iterator[list[str]]:
    """A list that receives, at the end, the processes that were started in the meantime and still run.

    This process adopts orphans, so that none can hide.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    left: list[str] = []
    before = _descendants()
    with patch.dict(os.environ, {VARIABLE: IN_VARIABLE}):
        yield left
    for _ in range(50):  # a killed process may take a moment to disappear
        started = {pid: name for pid, name in _descendants().items() if pid not in before}
        if not started:
            break
        time.sleep(0.1)
    left += [f"still running: {name}" for name in started.values()]


def _descendants() -> dict[int, str]:
    """The command lines of the descendants of this process that are not zombies."""
    names = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                names[process.pid] = " ".join(process.cmdline())[:200]
    own = ("resource_tracker", "forkserver")  # multiprocessing's, which live as long as this process
    return {pid: name for pid, name in names.items() if not any(word in name for word in own)}


@contextmanager
def workplace() -> Iterator[Path]:
    """A folder for a course and for all side files of grading; removed afterwards.

    Others may traverse it but not list it: the sandbox has a separate user, which must reach its scratch
    folder.
    """
    with tempfile.TemporaryDirectory(prefix="meshcraft-hostile-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        (folder / "tmp").mkdir()
        for path in (folder, folder / "tmp"):
            path.chmod(0o711)
        with patch.dict(os.environ, TMPDIR=str(folder / "tmp")), patch.object(tempfile, "tempdir", None):
            yield folder

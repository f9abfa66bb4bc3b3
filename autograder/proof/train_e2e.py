"""The long form of the tests of `meshcraft train` in `make test-long`: whole runs, compared with each other.

``python -m autograder.proof.train_e2e`` (``make trials``) trains the default model for 50 steps: on one device and on
several meshes; killed by SIGKILL and resumed, on the same mesh and on another; in two processes; and in two processes
of which one is killed. It prints each comparison and the difference of the losses. Exit status 0: all within the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

from autograder.learner.training import LOG, logged

ROOT = Path(__file__).resolve().parents[2]
STEPS, SAVED, KILLED = 50, 20, 30
LIMIT, SECONDS = 1e-3, 60.0
THREE, MICROBATCHES = "data=2,pipe=2,tensor=2", ("--microbatches", "2")
SHORT = ["--width", "32", "--layers", "4", "--heads", "4", "--seq", "32", "--batch", "16"]


@dataclass(frozen=True)
class Trial:
    """One comparison: its name, the largest difference or the elapsed seconds, the limit, and whether it passed."""

    name: str
    measured: float
    limit: float
    unit: str

    @property
    def passed(self) -> bool:
        return self.measured <= self.limit


@dataclass
class Runs:
    """Runs of the command in a folder, by name."""

    folder: Path
    sizes: list[str]
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def close(self) -> None:
        """Kill all that are still running."""
        for running in self.started:
            running.kill()  # no effect if it has ended
            running.wait()

    def start(self, name: str, *more: str) -> subprocess.Popen[bytes]:
        """Start the command in the background; its errors go to a file, since a pipe that nobody reads fills up."""
        arguments = ["--run", str(self.folder / name), "--sample", "0", "--evaluation-batches", "4", *more]
        if "--resume" not in more:
            arguments += ["--steps", str(STEPS), "--evaluate-every", str(STEPS), "--warmup", "5", *self.sizes]
        command = [sys.executable, "-m", "autograder.cli", "train", "--save-every", str(SAVED), *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with self._error_file(name).open("wb") as errors:
            running = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=errors)
        self.started.append(running)
        return running

    def errors(self, name: str) -> str:
        """Everything that the last run of that name has written to standard error."""
        return self._error_file(name).read_text(errors="replace")

    def _error_file(self, name: str) -> Path:
        return self.folder / f"{name}.stderr"

    def whole(self, name: str, *more: str) -> dict[int, float]:
        """The losses of a run that must succeed, by step.

        Raises:
            RuntimeError: It failed.
        """
        if status := self.start(name, *more).wait():
            raise RuntimeError(f"{name} ended with status {status}:\n{self.errors(name)[-2000:]}")
        return self.losses(name)

    def losses(self, name: str) -> dict[int, float]:
        """The losses in its log so far."""
        events = logged(self.folder / name / LOG)
        return {event["step"]: event["loss"] for event in events if event["event"] == "step"}

    def until(self, name: str, running: subprocess.Popen[bytes], step: int) -> None:
        """Wait until a run has reached a step.

        Raises:
            RuntimeError: It ended before that.
        """
        while step not in self.losses(name):
            if running.poll() is not None:
                raise RuntimeError(f"{name} ended before step {step}:\n{self.errors(name)[-2000:]}")
            time.sleep(0.2)


def apart(one: dict[int, float], other: dict[int, float]) -> float:
    """The largest difference of two runs' losses; infinite if their steps differ."""
    return max(abs(one[step] - other[step]) for step in one) if one.keys() == other.keys() else float("inf")


def trials(runs: Runs) -> Iterator[Trial]:
    """All trials, in turn."""
    alone = runs.whole("alone", "--mesh", "data=1")
    three = ("--mesh", THREE, *MICROBATCHES)
    options = ("--mesh", THREE, "--microbatches", "4", "--repeats", "2", "--rings", "--remat")
    for name, arguments in (
        *((mesh, ("--mesh", mesh)) for mesh in ("data=8", "data=4,tensor=2", "data=2,tensor=4")),
        ("fsdp on data=8", ("--strategy", "fsdp")),
        (THREE, three),
        (f"{THREE} with repeats, rings and remat", options),
    ):
        yield Trial(f"{name} against one device", apart(alone, runs.whole(name, *arguments)), LIMIT, "loss")
    for before, after in (
        (("--mesh", "data=4,tensor=2"), ("--mesh", "data=4,tensor=2")),
        (("--mesh", "data=4,tensor=2"), ("--mesh", "data=8,tensor=1")),
        (three, three),
        (three, ("--mesh", "data=8,pipe=1,tensor=1", "--strategy", "transformer_3d")),
    ):
        yield _killed(runs, before, after)
    two = ("--mesh", "data=8", "--processes", "2")
    for mesh, arguments in ((THREE, (*three, "--processes", "2")), ("data=8", two)):
        losses = runs.whole(f"two on {mesh}", *arguments)
        yield Trial(f"two processes against one on {mesh}", apart(runs.losses(mesh), losses), LIMIT, "loss")
    running = runs.start("lost", *two)
    runs.until("lost", running, KILLED)
    start = time.monotonic()
    os.kill(_worker(running.pid, number=1), signal.SIGKILL)
    status, errors = running.wait(), runs.errors("lost")
    if status != 3 or "process 1 was ended by SIGKILL" not in errors or "--resume" not in errors:
        raise RuntimeError(f"a lost process was reported as status {status}:\n{errors[-2000:]}")
    yield Trial("one of two processes killed: until the error", time.monotonic() - start, SECONDS, "s")
    losses = runs.whole("lost", "--resume", *two)
    yield Trial("and resumed in two processes", apart(runs.losses("data=8"), losses), LIMIT, "loss")


def _killed(runs: Runs, before: tuple[str, ...], after: tuple[str, ...]) -> Trial:
    """Compare a run that is killed by SIGKILL and resumed with an undisturbed one."""
    name = f"killed on {before[1]}, then {after[1]}"
    running = runs.start(name, *before)
    runs.until(name, running, KILLED)
    running.kill()
    running.wait()
    losses = runs.whole(name, "--resume", *after)
    return Trial(f"kill -9 on {before[1]}, resumed on {after[1]}", apart(runs.losses(before[1]), losses), LIMIT, "loss")


def _worker(launcher: int, number: int) -> int:
    """The process id of a launcher's worker."""
    import psutil

    from course.training.processes import PLACE

    for child in psutil.Process(launcher).children():
        if child.environ().get(PLACE, "").split()[:1] == [str(number)]:
            return child.pid
    raise RuntimeError(f"process {number} is not there")


def main(arguments: list[str] | None = None) -> int:
    """Run the trials, and return the exit status."""
    parser = argparse.ArgumentParser(prog="make trials", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--short", action="store_true", help="a tiny model, to try the command")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(arguments)
    sizes, done = SHORT * options.short, []
    with tempfile.TemporaryDirectory(prefix="meshcraft-") as folder, closing(Runs(Path(folder), sizes)) as runs:
        for trial in trials(runs):
            done.append(trial)
            figures = f"{trial.measured:9.2e} {trial.unit:4} (limit {trial.limit:g})"
            print(f"{'passes' if trial.passed else 'FAILS'}  {figures}  {trial.name}", file=sys.stderr)
    if options.json:
        print(json.dumps({"steps": STEPS, "trials": [{**asdict(trial), "passed": trial.passed} for trial in done]}))
    return 0 if all(trial.passed for trial in done) else 1


if __name__ == "__main__":
    sys.exit(main())

"""The facts that ``check --mesh real`` adds: speed and peak memory on real devices, compared with our solution.

The learner's Program is exported in the learner's process and everything else happens in separate processes: one
imports the solution and exports it, one times both Programs in pairs, and one per Program measures its memory.
Anything that could not be measured reads "not measured" and has no effect on points.
"""

from __future__ import annotations

import base64
import importlib
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autograder.checking.judging import Export, exported
from autograder.contract.case import from_plain, to_plain
from autograder.contract.facts import unmeasured
from autograder.contract.task import Case, Task, load, named, trace
from autograder.contract.verdict import Fact, Kind, Result, Unit
from course.measured import fresh
from course.measured.fresh import MeasurementFailed
from course.measured.memory import Peak, peak_memory
from course.measured.run import mesh_of_present, paired, place, stepper, too_few
from course.measured.statistics import FAIL, PASS, Comparison, compare
from course.program import Locate, Program, ProgramError, compile_program

# Ratio to the reference's: good and naive programs differ by more than this if a contract has such a fact.
SPEED_RATIO = MEMORY_RATIO = 1.15
SPEED, MEMORY = "measured speed", "measured peak memory"
NO_PEAK = "this backend's memory_stats() has no peak"
# Time limit for timing pairs, and the allowance for starting, compiling and drawing inputs.
PAIR_SECONDS, START_SECONDS = 120.0, 240.0
# XLA merges the chunks of a ring's matmuls by default, and then nothing overlaps.
FLAGS = "--xla_gpu_dot_merger_threshold_mb=0"


@dataclass(frozen=True)
class Bench:
    """The devices present, from the card of a fresh process; ``platform`` ``cpu`` tests the plumbing."""

    card: dict[str, Any]
    platform: str = ""

    @property
    def usable(self) -> bool:
        return self.card["platform"] == "gpu" or self.platform == "cpu"

    @property
    def exported_for(self) -> str:
        return "cpu" if self.platform == "cpu" else "cuda"

    @property
    def flags(self) -> str:
        return "" if self.platform == "cpu" else FLAGS


def survey(platform: str = "") -> Bench:
    """Find this machine's devices.

    Raises:
        MeasurementFailed: The process to query them could not be started.
    """
    return Bench(fresh.ask({"do": "card"}, seconds=120, platform=platform), platform)


@dataclass(frozen=True)
class MeasuredFacts:
    """Facts measured on a bench, for functions with correct values; ``progress`` receives the current activity."""

    chapter: str
    bench: Bench | None
    notes: tuple[str, ...] = ()
    progress: Callable[[str], None] = lambda text: None

    def exports(self, task: Task) -> list[Export]:
        case = self.bench and not _unusable(self.bench) and realistic_case(task, self.bench.card["count"])
        return [(task, [case], self.bench.exported_for)] if self.bench and case else []

    def facts(self, task: Task, result: Result, function: Any, locate: Locate) -> list[Fact]:
        if self.bench is None:
            return []
        self.progress(f"measuring {task.name}")
        wrong = any(fact.name == "values" and fact.passed is False for fact in result.facts)
        reason = "its values are wrong, so its speed is not measured" if wrong else ""
        return measured_facts(self.chapter, task, function, locate, self.bench, reason)


def measured_here(chapter: str, progress: Callable[[str], None] = lambda text: None) -> MeasuredFacts:
    """The facts measured on this machine's devices, with a note that names the devices."""
    try:
        bench = survey()
    except MeasurementFailed as error:
        return MeasuredFacts(chapter, None, (f"nothing was measured: {error}",))
    card = bench.card
    note = f"measured on {card['count']} x {card['kind']}, jax {card['versions'].get('jax')}"
    return MeasuredFacts(chapter, bench, (note,) if bench.usable else (), progress)


def measured_facts(
    chapter: str, task: Task, function: Any, locate: Locate, bench: Bench, reason: str = ""
) -> list[Fact]:
    """The facts of measured speed and measured peak memory of a function, in this order.

    Args:
        chapter, task: Identify the function.
        function: The learner's function.
        locate: As for ``export``.
        bench: The devices.
        reason: Why nothing is to be measured, if applicable.
    """
    reason = reason or _unusable(bench)
    case = None if reason else realistic_case(task, bench.card["count"])
    if case is None:
        assert task.at_scale
        reason = reason or too_few(smallest_mesh(task), bench.card["count"], bench.card["kind"])
        return [_not_measured(name, task.at_scale[0].name, reason) for name in (SPEED, MEMORY)]
    try:
        ours = exported(task, function, case, locate, bench.exported_for)
        theirs = _reference(chapter, task, case, bench)
    except (ProgramError, MeasurementFailed) as error:
        return [_not_measured(name, case.name, str(error)) for name in (SPEED, MEMORY)]
    return [_speed(chapter, task, case, ours, theirs, bench), _memory(case, ours, theirs, bench)]


def _unusable(bench: Bench) -> str:
    if bench.usable:
        return ""
    return (
        f"there are no GPUs that JAX can use here: it sees only {bench.card['kind']}. Run it on a machine "
        "with GPUs and JAX's GPU support (pip install 'jax[cuda12]'), or leave `--mesh real` out"
    )


def realistic_case(task: Task, present: int) -> Case | None:
    """The realistic size on the largest mesh that fits the devices present; None if none does.

    That mesh is the analysed one, or another with the same axes for which the contract has a case with the small sizes
    that the realistic size enlarges.
    """
    fitting = [case for case in _realistic(task) if math.prod(case.mesh.values()) <= present]
    return max(fitting, key=lambda case: math.prod(case.mesh.values()), default=None)


def smallest_mesh(task: Task) -> dict[str, int]:
    """The smallest mesh that the realistic size can be measured on."""
    return min((case.mesh for case in _realistic(task)), key=lambda mesh: math.prod(mesh.values()))


def _realistic(task: Task) -> list[Case]:
    assert task.at_scale
    large, name = task.at_scale
    small = next(case for case in task.cases if case.name == name)
    return [large] + [
        Case(large.name.replace(large.mesh_text, case.mesh_text), case.mesh, large.sizes)
        for case in task.cases
        if case.sizes == small.sizes and list(case.mesh) == list(large.mesh) and case.mesh != large.mesh
    ]


def _ask(chapter: str, task: Task, case: Case, do: str, bench: Bench, **options: Any) -> dict[str, Any]:
    request = {"do": do, "chapter": chapter, "task": task.name, "case": to_plain(case)}
    request |= {"exported_for": bench.exported_for, "pair_seconds": PAIR_SECONDS}
    return fresh.ask(
        request, module="autograder.learner.hardware_check", seconds=PAIR_SECONDS + START_SECONDS, **options
    )


def _reference(chapter: str, task: Task, case: Case, bench: Bench) -> Program:
    """The solution's Program, from a process that needs no device."""
    try:
        answer = _ask(chapter, task, case, "reference", bench, platform="cpu")
    except MeasurementFailed as error:
        raise MeasurementFailed(f"there is no reference to compare with: {error}") from None
    return Program.load(base64.b64decode(answer["program"]))


def _speed(chapter: str, task: Task, case: Case, ours: Program, theirs: Program, bench: Bench) -> Fact:
    files = {"ours": ours.serialise(), "theirs": theirs.serialise()}
    try:
        answer = _ask(chapter, task, case, "pairs", bench, files=files, platform=bench.platform, flags=bench.flags)
    except MeasurementFailed as error:
        return _not_measured(SPEED, case.name, str(error))
    return speed_fact(Comparison(**answer), case.name)


def speed_fact(result: Comparison, case: str) -> Fact:
    """The fact about speed from a comparison."""
    passed = {PASS: True, FAIL: False}.get(result.outcome)
    message = (
        f"a step takes {result.ratio:.3f} times as long as the reference's; after {result.pairs} pairs the ratio is, "
        f"with 95% confidence on each side, {result.low:.3f} to {result.high:.3f}; the limit is {result.threshold:g}. "
    )
    if passed is None:
        message += "Inconclusive: run it again on a machine that does nothing else."
    elif not passed:
        message += "What waits for something that could have been there already, or is computed twice?"
    details: dict[str, Any] = {
        "interval": (result.low, result.high),
        "reference": 1.0,
        "unit": Unit.REFERENCE,
        "case": case,
    }
    return Fact(SPEED, Kind.TIME, passed, result.ratio, result.threshold, **details, message="" if passed else message)


def _memory(case: Case, ours: Program, theirs: Program, bench: Bench) -> Fact:
    run = {"seconds": START_SECONDS, "platform": bench.platform, "flags": bench.flags}
    try:
        reference = peak_memory(theirs, **run)
    except MeasurementFailed as error:
        return _not_measured(MEMORY, case.name, f"the reference itself cannot be run here: {error}")
    if reference.bytes is None:
        return _not_measured(MEMORY, case.name, NO_PEAK)
    try:
        measured = peak_memory(ours, **run)
    except MeasurementFailed as error:
        if error.kind != "out of memory":
            return _not_measured(MEMORY, case.name, str(error))
        measured = None
    return memory_fact(measured, reference, case.name)


def memory_fact(measured: Peak | None, reference: Peak, case: str) -> Fact:
    """The fact about two memory peaks; ``measured`` is None for a program that, unlike the reference, did not fit."""
    if reference.bytes is None or (measured is not None and measured.bytes is None):
        return _not_measured(MEMORY, case, NO_PEAK)
    if reference.at_most or (measured is not None and measured.at_most):
        return _not_measured(MEMORY, case, "compiling took as much memory as the whole run, which hides the step's own")
    limit = MEMORY_RATIO * reference.bytes
    peak = measured and measured.bytes
    message = "the device does not have enough memory for the program, but the reference runs on it."
    if peak is not None:
        message = (
            f"at its peak a device has {peak:,} resident bytes, {peak / reference.bytes:.2f} times the reference's."
        )
    passed = peak is not None and peak <= limit
    message = "" if passed else f"{message} What stays resident longer than it is needed?"
    details: dict[str, Any] = {"unit": Unit.BYTES, "reference": reference.bytes, "case": case, "message": message}
    return Fact(MEMORY, Kind.MEMORY, passed, "does not fit" if peak is None else peak, limit, **details)


def _not_measured(name: str, case: str, why: str) -> Fact:
    return unmeasured(name, Kind.TIME, why, case=case)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """In a separate process: export the ``reference``, or time ``pairs``."""
    task = load(request["chapter"]).task(request["task"])
    case = from_plain(request["case"], task.wrapping.sizes)
    if request["do"] == "reference":
        function = getattr(importlib.import_module(f"solutions.{request['chapter']}"), task.name)
        program = trace(task, function, case, lambda _: None, platform=request["exported_for"])
        return {"program": base64.b64encode(program.serialise()).decode()}
    folder = Path(request["folder"])
    inputs = named(task.draw(np.random.default_rng(0), case))
    programs = [Program.load((folder / name).read_bytes()) for name in ("ours", "theirs")]
    ready = [compile_program(program, mesh_of_present(program.mesh)) for program in programs]
    placed = [place(ready[0], inputs)]
    # Inputs that both only read are shared, so that two programs need no more memory than one.
    placed.append(place(ready[1], inputs) if any(program.donated for program in programs) else placed[0])
    steps = [stepper(executable, arrays) for executable, arrays in zip(ready, placed, strict=True)]
    end = time.monotonic() + request["pair_seconds"]
    return asdict(compare(paired(*steps), SPEED_RATIO, enough=lambda: time.monotonic() > end))


if __name__ == "__main__":
    import course  # noqa: F401  before JAX starts

    fresh.serve(sys.argv[1], answer)

"""Run Programs on the devices present and time them: one alone, or two in interleaved pairs."""

from __future__ import annotations

import glob
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from course.machine import TooFewDevices
from course.measured.statistics import Sample
from course.mesh import make_mesh, mesh_text
from course.program import Executable, Leaf, Program

LEAST_SECONDS = 0.005
MOST_REPEATS = 100
BLOCK = 2**20

# Runs one step, waits for it, and returns the seconds it took on the host's clock.
Step = Callable[[], float]


def mesh_of_present(axes: dict[str, int], devices: list[Any] | None = None) -> Mesh:
    """A mesh of the devices that are present.

    Raises:
        TooFewDevices: There are not enough for ``axes``.
    """
    present = jax.devices() if devices is None else devices
    needed = int(np.prod(list(axes.values())))
    if len(present) < needed:
        raise TooFewDevices(too_few(axes, len(present), present[0].device_kind if present else "device"))
    return make_mesh(axes, present)


def too_few(axes: dict[str, int], present: int, kind: str) -> str:
    """The message for a mesh that is larger than the machine."""
    mesh, needed = mesh_text(axes), int(np.prod(list(axes.values())))
    count_text = f"{present} is" if present == 1 else f"{present} are"
    return (
        f"mesh {mesh} needs {needed} devices and {count_text} present ({kind}). Run it on a machine with {needed}, "
        "or leave `--mesh real` out: everything but measured time and memory is judged on emulated devices"
    )


def fill(program: Program, *, high: int = 2, seed: int = 0) -> dict[str, np.ndarray]:
    """Arrays for every input of a Program, for runs whose results are not examined.

    Floats are small and positive, so that an optimizer's second moments are valid; integers are below
    ``high``, and a single integer (a count of steps) is 1. Large arrays repeat a block of random numbers.

    Args:
        program: The Program whose signature is filled.
        high: One above the largest integer: the vocabulary, for tokens.
        seed: Seed of the random numbers.
    """
    rng = np.random.default_rng(seed)
    small, whole = rng.random(BLOCK, np.float32) * np.float32(0.02), rng.integers(0, high, BLOCK)
    return {leaf.name: _filled(leaf, small, whole) for leaf in program.inputs}


def _filled(leaf: Leaf, small: np.ndarray, whole: np.ndarray) -> np.ndarray:
    dtype = jnp.dtype(leaf.dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.resize(small.astype(dtype), leaf.shape)
    return np.resize(whole, leaf.shape).astype(dtype) if leaf.shape else np.ones((), dtype)


def place(executable: Executable, inputs: dict[str, np.ndarray]) -> list[jax.Array]:
    """Place the inputs on the Program's devices, each in its sharding, in order."""
    mesh, leaves = executable.mesh, executable.program.inputs
    placed = [jax.device_put(inputs[leaf.name], NamedSharding(mesh, leaf.partition_spec)) for leaf in leaves]
    return jax.block_until_ready(placed)


def stepper(executable: Executable, placed: list[jax.Array]) -> Step:
    """Make a step that can be run repeatedly.

    A donated input is gone after a step: the result with the same name, shape, dtype and sharding replaces it, as in
    training; if there is none, a copy made before the clock starts is donated instead.

    Args:
        executable: The executable to run.
        placed: Its inputs; from here on the step owns the donated ones.
    """
    program, arrays = executable.program, list(placed)
    following = {i: at for i in program.donated if (at := _successor(program, i)) is not None}
    copied = [i for i in program.donated if i not in following]

    def step() -> float:
        arguments = [jnp.copy(array) if i in copied else array for i, array in enumerate(arrays)]
        jax.block_until_ready(arguments)
        start = time.perf_counter()
        results = jax.block_until_ready(executable.call(*arguments))
        took = time.perf_counter() - start
        for i, at in following.items():
            arrays[i] = results[at]
        return took

    return step


def _successor(program: Program, index: int) -> int | None:
    """Index of the output that can be the next step's input, if there is one."""
    donated = program.inputs[index]
    key = (donated.name, donated.shape, donated.dtype, donated.spec)
    return next((i for i, x in enumerate(program.outputs) if (x.name, x.shape, x.dtype, x.spec) == key), None)


def paired(ours: Step, theirs: Step) -> Sample:
    """Time two steps in pairs, repeating each to fill a few milliseconds, equally often for both."""
    for step in (ours, theirs):
        step()
    once = min(ours(), theirs())
    repeats = int(np.clip(np.ceil(LEAST_SECONDS / max(once, 1e-9)), 1, MOST_REPEATS))

    def timed(step: Step) -> float:
        return sum(step() for _ in range(repeats))

    def sample(ours_first: np.ndarray) -> np.ndarray:
        log_ratios = []
        for first in ours_first:
            a = timed(ours if first else theirs)
            b = timed(theirs if first else ours)
            log_ratios.append(np.log(a / b) if first else np.log(b / a))
        return np.array(log_ratios)

    return sample


def time_steps(step: Step, *, steps: int = 30, seconds: float = 60) -> list[float]:
    """Seconds that each step took, without the warm-up; fewer than ``steps`` if time runs out, but at least 3."""
    for _ in range(2):  # the warm-up
        step()
    times: list[float] = []
    while len(times) < 3 or (len(times) < steps and sum(times) < seconds):
        times.append(step())
    return times


def device_seconds(step: Step, steps: int = 3) -> tuple[float | None, str]:
    """Seconds that the device itself was busy with a step, from the profiler's events, and how that was measured.

    The median over steps of the time from a step's first kernel to the end of its last one, from the trace's device
    timeline. None if the profiler has no such timeline (a CPU, or a GPU without CUPTI); the second value says why.
    """
    durations = []
    try:
        for _ in range(steps):
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    step()
                paths = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
                spans = [span for path in paths for span in _spans(jax.profiler.ProfileData.from_file(path).planes)]
            if not spans:
                return None, "the profiler shows no device timeline here"
            durations.append(max(spans))
    except (RuntimeError, OSError, AttributeError, ValueError) as error:
        return None, f"the profiler failed: {type(error).__name__}"
    return float(np.median(durations)), "first kernel to last, jax.profiler device timeline"


def _spans(planes: Any) -> list[float]:
    """Seconds from the first event to the last one on every device in a trace."""
    durations = []
    for plane in planes:
        if "/device:" not in plane.name or "CUSTOM" in plane.name:
            continue
        lines = list(plane.lines)
        # Lines other than streams are derived from them and may include host time.
        streams = [line for line in lines if line.name.startswith("Stream")] or lines
        events = [(event.start_ns, event.start_ns + event.duration_ns) for line in streams for event in line.events]
        if events:
            durations.append((max(end for _, end in events) - min(start for start, _ in events)) * 1e-9)
    return durations

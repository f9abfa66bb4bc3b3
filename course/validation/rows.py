"""Every figure that the analyses are compared with, and their results; nothing is fitted to any single figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from course.machines import FREE_NETWORK, machine
from course.mesh import abstract_mesh
from course.planning.efficiency import factors
from course.program import Program, ProgramError, bubble, costs, export, memory, parse, timeline
from course.program.compiled import GpuReport, compile_for
from course.program.compiled.plugin import AotMissing
from course.schedules import num_ticks
from course.validation.gap import compiled_run
from course.validation.gpus import A5000, UVA, ours
from course.validation.pipelines import pipeline, uva_pipeline
from course.validation.rings import gather_matmul
from course.validation.runs import factor, others, runs
from course.validation.single_device import RUNS, Sizes, single_device

MEMORY, TIME, TABLES = A5000.memory, A5000.time, "XLA's tables, 8xH100"
PLANNED_TIME, PLANNED_MEMORY = "planner, time", "planner, memory"
LOOPING, RINGS, CLOSED = "looping pipeline", "ring matmul, 8xH100", "closed forms"
OWN_RATES = "timeline, own rates"
BUBBLES = [(s, m, r) for s in (1, 2, 4, 8) for m in (1, 2, 4, 8, 16) for r in (1, 2, 4)]
SHORT_BUBBLES = [(8, 1, 1), (8, 16, 1), (4, 2, 2), (8, 8, 4)]


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        group: The rows that it is averaged with.
        name: Name of the figure.
        lens: The analysis that gives ``found``.
        published: The expected value: from a closed form, or a published measurement.
        found: The analysis's result, or None if it was not run.
        unit: Unit of both.
        source: Source of ``published``.
        counts: Whether it belongs to the group's mean; False if the analysis has used the same figure.
        note: Why it was not run, or does not count.
    """

    group: str
    name: str
    lens: str
    published: float
    found: float | None
    unit: str
    source: str
    counts: bool = True
    note: str = ""

    @property
    def error(self) -> float | None:
        """Error relative to the published value."""
        if self.found is None:
            return None
        return self.found / self.published - 1 if self.published else float(self.found)


def bubble_name(stages: int, microbatches: int, repeats: int) -> str:
    """The name of a pipeline's figure."""
    return f"bubble, S={stages} M={microbatches} R={repeats}"


def closed_forms(short: bool) -> Iterator[Figure]:
    """Figures that must be exact: bubbles, bytes of rings, FSDP's state, FLOPs."""
    stage_seconds = timeline(parse(pipeline(1, 1)), FREE_NETWORK).seconds
    source = "1 - RM/T, T = (R-1)max(M,S) + M + S - 1"
    for stages, microbatches, repeats in SHORT_BUBBLES if short else BUBBLES:
        simulated = timeline(parse(pipeline(stages, microbatches, repeats)), FREE_NETWORK)
        form = 1 - repeats * microbatches / num_ticks(stages, microbatches, repeats)
        idle = bubble(stage_seconds * stages * microbatches * repeats, stages, simulated.seconds)
        yield Figure(CLOSED, bubble_name(stages, microbatches, repeats), "timeline", form, idle, "", source)
    for kind, (collective, out, form) in _COLLECTIVES.items():
        sent = costs(parse(_over_data(collective, (16, 8), out))).collectives[0].wire_bytes
        yield Figure(CLOSED, f"{kind} over 8 devices", "costs", form, sent, "bytes", "ring algorithm")
    state = _over_data(lambda x: 2 * x, (512, 512), P("data"))
    resident = memory(parse(state), state).arguments
    yield Figure(CLOSED, "FSDP state of 1 MiB on 8 devices", "memory", 2**20 / 8, resident, "bytes", "1/n")
    flops, source = costs(parse(single_device(RUNS[1]))).flops, "6N + 12Lds a token, N the weights of matrix products"
    yield Figure(CLOSED, "FLOPs of a Transformer's step", "costs", Sizes().model_flops, flops, "FLOPs", source)


_BLOCK = 16 // 8 * 8 * 4
_COLLECTIVES: dict[str, tuple[Callable[[jax.Array], jax.Array], P, float]] = {
    "all-gather": (lambda x: lax.all_gather(x, "data", tiled=True), P("data"), 7 * _BLOCK),
    "reduce-scatter": (
        lambda x: lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True),
        P("data"),
        7 / 8 * _BLOCK,
    ),
    "all-reduce": (lambda x: lax.psum(x, "data"), P(), 2 * 7 / 8 * _BLOCK),
    "permute": (lambda x: lax.ppermute(x, "data", [(i, (i + 1) % 8) for i in range(8)]), P("data"), _BLOCK),
}


def _over_data(function: Callable[[jax.Array], jax.Array], shape: tuple[int, ...], out: P) -> Program:
    """A Program that applies a function to the blocks of one array split over 8 devices."""
    mesh = {"data": 8}
    run = jax.shard_map(function, mesh=abstract_mesh(mesh), in_specs=P("data"), out_specs=out)
    inputs = {"x": jax.ShapeDtypeStruct(shape, jnp.float32)}
    return export(lambda x: {"x": run(x)}, inputs, {"x": P("data")}, mesh=mesh, out_specs={"x": out})


def single_gpu(short: bool, aot: bool) -> Iterator[Figure]:
    """The six published runs, on one A5000 and on each kind of GPU that we measured.

    Memory is by liveness and by the compiler; time by timeline and by replay, and on our GPUs by the timeline at the
    rates that the card itself reached.
    """
    for run in RUNS[3:4] if short else RUNS:
        program = single_device(run)
        module = parse(program)
        peak = memory(module, program).peak
        for gpu in (A5000, *(own for _, own in ours())):
            if run.name not in gpu.runs:
                continue
            measured_bytes, seconds = gpu.runs[run.name]
            report, reason = _compiled(lambda run=run, gpu=gpu: compiled_run(run, gpu.machine), aot)
            figures = [
                (gpu.memory, "liveness", measured_bytes / 1e9, peak / 1e9, "GB"),
                (gpu.memory, "compiled", measured_bytes / 1e9, report and report.memory.peak / 1e9, "GB"),
                (gpu.time, "timeline", seconds, timeline(module, machine(gpu.machine)).seconds, "s"),
                (gpu.time, "replay", seconds, report and report.replay.seconds, "s"),
            ]
            if gpu.own_rates:
                figures.append((gpu.time, OWN_RATES, seconds, timeline(module, gpu.own_rates).seconds, "s"))
            for group, lens, published, value, unit in figures:
                note = reason if value is None else ""
                yield Figure(group, run.name, lens, published, value, unit, gpu.source, note=note)


def _compiled(report: Callable[[], GpuReport], aot: bool) -> tuple[GpuReport | None, str]:
    """The GPU compiler's result, or why there is none."""
    try:
        return (report(), "") if aot else (None, "not requested")
    except (AotMissing, ProgramError) as error:
        return None, str(error)


def looping() -> Iterator[Figure]:
    """The time that looping saves a pipeline on 8 A5000s, as a ratio of two steps."""
    plain, looped = (
        timeline(parse(uva_pipeline(is_looped)), machine(A5000.machine)).seconds for is_looped in (False, True)
    )
    yield Figure(LOOPING, "looped against plain, 8xA5000", "timeline", 190 / 205, looped / plain, "ratio", UVA)


def rings(aot: bool) -> Iterator[Figure]:
    """A ring all-gather and matmul on 8 H100s, compared with the plain all-gather."""
    (plain, plain_reason), (ring, reason) = (
        _compiled(lambda ring=ring: compile_for(gather_matmul(ring, platform="cuda"), machine(IDEALISED)), aot)
        for ring in (False, True)
    )
    covered = ring and float(sum(c.count for c in ring.collectives if c.spans_matmul))
    halved = ring and plain and ring.memory.temporaries / plain.memory.temporaries
    source = "7 transfers and a quarter of the gathered array's rows less to hold, by counting"
    yield Figure(RINGS, "permutes that span a matmul", "compiled", 7, covered, "", source, note=reason)
    reason = reason or plain_reason
    yield Figure(RINGS, "temporaries, ring against plain", "compiled", 0.5, halved, "ratio", source, note=reason)


IDEALISED, CALIBRATED = "8xH100", "8xH100-calibrated"
# XLA's measured rates on one node: FLOP/s by the side of square matrices, and bytes/s of a gathered array by its MiB.
MATMULS = {1024: 253e12, 4096: 780e12}
GATHERS = {2: 58e9, 8: 113e9, 32: 227e9, 128: 301e9, 1024: 344e9}


def matmul_name(side: int) -> str:
    """The name of a matmul of XLA's tables; the names of its figures append the machine."""
    return f"matmul {side}³"


def gather_name(mebibytes: int) -> str:
    """The same for an all-gather."""
    return f"all-gather {mebibytes} MiB"


def tables() -> Iterator[Figure]:
    """XLA's tables for 8 H100s: the calibrated machine includes them, the idealised one is compared with them."""
    for name in (IDEALISED, CALIBRATED):
        target = machine(name)
        counts, note = not target.calibrated, "carries this very table" if target.calibrated else ""
        rates = {}
        for side, rate in MATMULS.items():
            seconds = target.matmul_seconds(2.0 * side**3, 3 * 2.0 * side**2, "bf16")
            rates[matmul_name(side)] = rate / 1e12, 2e-12 * side**3 / seconds, "TFLOP/s"
        for mebibytes, rate in GATHERS.items():
            size = mebibytes * 2**20
            wire = size * 7 / 8
            latency, bandwidth = target.transfer("all_gather", tuple(range(8)), wire, size)
            rates[gather_name(mebibytes)] = rate / 1e9, wire / (latency + wire / bandwidth) / 1e9, "GB/s"
        for figure_name, (rate, predicted, unit) in rates.items():
            source = "XLA's measured tables for one 8xH100 node"
            yield Figure(TABLES, f"{figure_name}, {name}", "timeline", rate, predicted, unit, source, counts, note)


def planned(short: bool) -> Iterator[Figure]:
    """The planner on published runs: at the chip's factor, and at the one fitted only to other papers' runs."""
    published = runs()
    for run in published[-2:] if short else published:
        estimate = run.estimate(factors()[run.machine.device].factor)
        name, rest = f"{run.paper}: {run.name}", others(run, published)
        yield Figure(PLANNED_TIME, name, "planner", run.seconds, estimate.seconds, "s", run.source)
        if rest:
            unseen = run.estimate().seconds / factor(rest)
            yield Figure(PLANNED_TIME, name, "unseen", run.seconds, unseen, "s", run.source)
        if run.memory:
            yield Figure(PLANNED_MEMORY, name, "planner", run.memory / 1e9, estimate.bytes / 1e9, "GB", run.source)


def every(short: bool = False, aot: bool = True) -> Iterator[Figure]:
    """All figures.

    Args:
        short: A few of each group, for a test.
        aot: Whether to use the GPU compiler too.
    """
    yield from closed_forms(short)
    yield from single_gpu(short, aot)
    yield from looping()
    yield from rings(aot)
    yield from tables()
    yield from planned(short)


def figures_of(figures: Sequence[Figure], group: str, lens: str = "") -> list[Figure]:
    """Those of a group, by one analysis or by all."""
    return [figure for figure in figures if figure.group == group and lens in ("", figure.lens)]


def ratios_of(figures: Sequence[Figure], group: str, lens: str, scale: float = 1.0) -> tuple[float | None, ...]:
    """The ratio of an analysis's result to the published value, for each figure of a group."""
    return tuple(f.found and scale * f.found / f.published for f in figures_of(figures, group, lens))


def xla_tables(figures: Sequence[Figure], machine: str) -> dict[str, Figure]:
    """The figures of XLA's tables on a machine, by name."""
    by_name = {figure.name: figure for figure in figures_of(figures, TABLES)}
    names = [*map(matmul_name, MATMULS), *map(gather_name, GATHERS)]
    return {name: by_name[f"{name}, {machine}"] for name in names}

"""Every figure that the lenses are held against, beside what they give; nothing is fitted to a single row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from course.budget import Sizes as BudgetSizes
from course.budget import flops_per_token
from course.machines import FREE_NETWORK, machine
from course.mesh import abstract_mesh
from course.program import Program, bubble, costs, export, memory, parse, timeline
from course.program.compiled import GpuReport, compile_all
from course.program.compiled.plugin import AotMissing
from course.schedules import num_ticks
from course.validation.gap import A5000, compiled_runs
from course.validation.pipelines import pipeline, uva_pipeline
from course.validation.rings import gather_matmul
from course.validation.single_device import RUNS, Sizes, single_device

UVA = "P. Lippe, Training Models at Scale, University of Amsterdam, 2024"
BUBBLES = [(s, m, r) for s in (1, 2, 4, 8) for m in (1, 2, 4, 8, 16) for r in (1, 2, 4)]
SHORT_BUBBLES = [(8, 1, 1), (8, 16, 1), (4, 2, 2), (8, 8, 4)]


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        group: The rows that it is averaged with.
        name: What it is of.
        lens: Which lens gives ``found``.
        published: What it should be: a closed form's value, or what somebody measured.
        found: What the lens gives, or None if it was not asked.
        unit: Of both.
        source: Where ``published`` is from.
        counts: Whether it belongs to the group's mean; not if the lens has used the same figure.
        note: Why it was not asked, or does not count.
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
        """Relative to what was published."""
        if self.found is None:
            return None
        return self.found / self.published - 1 if self.published else float(self.found)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def closed_forms(short: bool) -> Iterator[Row]:
    """What must hold exactly: bubbles, bytes of rings, FSDP's state, FLOPs."""
    one = timeline(parse(pipeline(1, 1)), FREE_NETWORK).seconds
    for stages, microbatches, repeats in SHORT_BUBBLES if short else BUBBLES:
        found = timeline(parse(pipeline(stages, microbatches, repeats)), FREE_NETWORK)
        form = 1 - repeats * microbatches / num_ticks(stages, microbatches, repeats)
        useful = one * stages * microbatches * repeats
        name = f"bubble, S={stages} M={microbatches} R={repeats}"
        yield Row("closed forms", name, "timeline", form, bubble(useful, stages, found.seconds), "",
                  "1 - RM/T, T = (R-1)max(M,S) + M + S - 1")  # fmt: skip
    for kind, collective, out, form in _RINGS:
        sent = costs(parse(_ring(collective, out))).collectives[0].wire_bytes
        yield Row("closed forms", f"{kind} over 8 devices", "costs", form, sent, "bytes", "ring algorithm")
    held = memory(*_sharded_state()).arguments
    yield Row("closed forms", "FSDP state of 1 MiB on 8 devices", "memory", 2**20 / 8, held, "bytes", "1/n")
    sizes = Sizes()
    weights = sizes.num_layers * 12 * sizes.width**2 + sizes.vocabulary * sizes.width
    model = BudgetSizes(sizes.num_layers, sizes.width, sizes.num_heads, sizes.vocabulary, sizes.sequence,
                        parameters=weights)  # fmt: skip
    flops = costs(parse(single_device(RUNS[1]))).flops
    form = float(sizes.batch * sizes.sequence * flops_per_token(model))
    yield Row("closed forms", "FLOPs of a Transformer's step", "costs", form, flops, "FLOPs",
              "6N + 12Lds a token, N the weights of matrix products")  # fmt: skip


_BLOCK = 16 // 8 * 8 * 4
_RINGS = [
    ("all-gather", lambda x: lax.all_gather(x, "data", tiled=True), P("data"), 7 * _BLOCK),
    ("reduce-scatter", lambda x: lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True), P("data"),
     7 / 8 * _BLOCK),
    ("all-reduce", lambda x: lax.psum(x, "data"), P(), 2 * 7 / 8 * _BLOCK),
    ("permute", lambda x: lax.ppermute(x, "data", [(i, (i + 1) % 8) for i in range(8)]), P("data"), _BLOCK),
]  # fmt: skip


def _ring(collective: Any, out: P) -> Program:
    mesh = {"data": 8}
    run = jax.shard_map(collective, mesh=abstract_mesh(mesh), in_specs=P("data"), out_specs=out)
    inputs = {"x": jax.ShapeDtypeStruct((16, 8), jnp.float32)}
    return export(lambda x: {"y": run(x)}, inputs, {"x": P("data")}, mesh=mesh, out_specs={"y": out})


def _sharded_state() -> tuple[Any, Program]:
    mesh, inputs = {"data": 8}, {"x": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
    run = jax.shard_map(lambda x: 2 * x, mesh=abstract_mesh(mesh), in_specs=P("data"), out_specs=P("data"))
    program = export(lambda x: {"x": run(x)}, inputs, {"x": P("data")}, mesh=mesh, out_specs={"x": P("data")})
    return parse(program), program


def single_gpu(short: bool, aot: bool) -> Iterator[Row]:
    """The six published runs on one A5000: memory by liveness and by the compiler, time by timeline and by replay."""
    runs = RUNS[3:4] if short else RUNS
    compiled, why = _asked(lambda: compiled_runs(runs)) if aot else (None, _NO_AOT)
    for index, run in enumerate(runs):
        program = single_device(run)
        module = parse(program)
        report = compiled[index] if compiled else None
        for group, lens, published, found, unit in (
            ("A5000, memory", "liveness", run.peak / 1e9, memory(module, program).peak / 1e9, "GB"),
            ("A5000, memory", "compiled", run.peak / 1e9, report and report.memory.peak / 1e9, "GB"),
            ("A5000, time", "timeline", run.seconds, timeline(module, A5000).seconds, "s"),
            ("A5000, time", "replay", run.seconds, report and report.replay.seconds, "s"),
        ):
            yield Row(group, run.name, lens, published, found, unit, UVA, note="" if found is not None else why)


_NO_AOT = "not asked for"


def _asked(compiled: Callable[[], list[GpuReport]]) -> tuple[list[GpuReport] | None, str]:
    """What the GPU compiler gives, or why nothing."""
    try:
        return compiled(), ""
    except AotMissing as error:
        return None, str(error)


def looping(short: bool) -> Iterator[Row]:
    """What looping saves a pipeline on 8 A5000, as a ratio of two steps."""
    target = machine("8xA5000")
    plain, looped = (timeline(parse(uva_pipeline(which)), target).seconds for which in (False, True))
    yield Row("looping pipeline", "looped against plain, 8xA5000", "timeline", 190 / 205, looped / plain, "ratio", UVA)


def rings(short: bool, aot: bool) -> Iterator[Row]:
    """A ring all-gather and matmul on 8 H100, against the plain all-gather."""
    target = machine("8xH100")
    source = "7 transfers and a quarter of the gathered array's rows less to hold, by counting"
    group = "ring matmul, 8xH100"
    programs = [gather_matmul(ring, platform="cuda") for ring in (False, True)]
    compiled, why = _asked(lambda: compile_all(programs, target)) if aot else (None, _NO_AOT)
    covered = halved = None
    if compiled:
        plain, ring = compiled
        covered = float(sum(c.count for c in ring.collectives if c.spans_matmul))
        halved = ring.memory.temporaries / plain.memory.temporaries
    yield Row(group, "permutes that span a matmul", "compiled", 7, covered, "", source, note=why)
    yield Row(group, "temporaries, ring against plain", "compiled", 0.5, halved, "ratio", source, note=why)


def tables(short: bool) -> Iterator[Row]:
    """XLA's tables for 8 H100: the calibrated machine carries them, the idealised one is held against them."""
    source = "XLA's measured tables for one 8xH100 node"
    for name in ("8xH100", "8xH100-calibrated"):
        found = machine(name)
        counts, note = not found.calibrated, "carries this very table" if found.calibrated else ""
        for size, rate in ((1024, 253e12), (4096, 780e12)):
            seconds = found.matmul_seconds(2.0 * size**3, 3 * 2.0 * size**2, "bf16")
            yield Row("XLA's tables, 8xH100", f"matmul {size}³, {name}", "timeline", rate / 1e12,
                      2e-12 * size**3 / seconds, "TFLOP/s", source, counts, note)  # fmt: skip
        for mebibytes, rate in ((2, 58e9), (8, 113e9), (32, 227e9), (128, 301e9), (1024, 344e9)):
            size = mebibytes * 2**20
            latency, bandwidth = found.transfer("all_gather", tuple(range(8)), size * 7 / 8, size)
            wire = size * 7 / 8
            yield Row("XLA's tables, 8xH100", f"all-gather {mebibytes} MiB, {name}", "timeline", rate / 1e9,
                      wire / (latency + wire / bandwidth) / 1e9, "GB/s", source, counts, note)  # fmt: skip


def every(short: bool = False, aot: bool = True) -> Iterator[Row]:
    """All rows.

    Args:
        short: A few of each group, for a test.
        aot: Whether the GPU compiler is asked too.
    """
    yield from closed_forms(short)
    yield from single_gpu(short, aot)
    yield from looping(short)
    yield from rings(short, aot)
    yield from tables(short)

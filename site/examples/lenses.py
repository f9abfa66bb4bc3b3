"""A ring and a plain gather by every analysis, the output of the commands for them, and the analyses' refusals."""

import re
import tempfile
import textwrap
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from showing import Table, draw_steps, example, kept, say
from typer.testing import CliRunner

from autograder.cli import app
from autograder.proof import library
from autograder.proof.library import tried
from course.machines import machine
from course.mesh import abstract_mesh
from course.program import ProgramError, costs, export, memory, parse, timeline
from course.program.compiled import compile_all
from course.program.compiled.comparison import copying
from course.validation.corpus.record import Row
from course.validation.corpus.record import recorded as recorded_corpus
from course.validation.report import recorded
from course.validation.rings import gather_matmul

KEPT = Path(__file__).parents[2] / "autograder" / "proof" / "demo" / "submitted" / "kept" / "fsdp" / "fsdp.ipynb"
IDEAL, CALIBRATED, MODEL_FLOPS = "8xH100", "8xH100-calibrated", 2 * 4096 * 4096 * 16384
BOTH = {"plain": False, "ring": True}


@cache
def timed(ring, on=IDEAL, *sizes):
    return timeline(parse(gather_matmul(ring, *sizes)), machine(on))


def printed(*arguments):
    result = CliRunner(env={"COLUMNS": "100"}).invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return "\n".join(line.rstrip() for line in result.output.strip().splitlines())


@example("predicted, idealised")
def commands() -> dict[str, str]:
    """``meshcraft predict`` on the ring, and ``profile`` on a submission that keeps the gathered weights."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ring.program"
        file.write_bytes(gather_matmul(True).serialise())
        predicted = printed("predict", str(file), "--machine", IDEAL, "--model-flops", f"{MODEL_FLOPS}")
    profiled = printed("profile", "fsdp", "fsdp_loss", "--notebook", str(KEPT))
    say(model_flops=MODEL_FLOPS)
    return {"predicted": predicted, "profiled": profiled.split("\n\n")[0]}


@example("predicted, idealised", "predicted, calibrated")
def loses() -> Table:
    """Both on both H100 machines, in microseconds."""
    columns = (
        "the all-gather .1f",
        "one permute .1f",
        "the product .1f",
        "a chunk's .1f",
        "plain .1f",
        "ring .1f",
        "ring / plain .2f",
    )
    table = Table("µs", *columns)
    for on in (IDEAL, CALIBRATED):
        plain, ring = timed(False, on), timed(True, on)
        bars = {(step is ring, bar.kind): 1e6 * (bar.end - bar.start) for step in (plain, ring) for bar in step.bars}
        figures = [
            bars[False, "all_gather"],
            bars[True, "collective_permute"],
            bars[False, "dot_general"],
            bars[True, "dot_general"],
        ]
        row = table.add(f"`{on}`", *figures, 1e6 * plain.seconds, 1e6 * ring.seconds, ring.seconds / plain.seconds)
    sent = {bar.kind: bar.bytes for step in (plain, ring) for bar in step.bars}
    gather, permute = (
        sent[kind] / 450e3 / row[name]
        for kind, name in (("all_gather", "the all-gather"), ("collective_permute", "one permute"))
    )
    assert abs(8 * permute - 1) < 0.03 and abs(2 * gather - 1) < 0.03, "an eighth and a half of the peak"
    assert abs(5 * row["a chunk's"] / row["the product"] - 1) < 0.02
    say(permute=f"{row['one permute']:.0f}", chunk=f"{figures[3]:.0f}", steps=f"{7 / 23:.4f}")
    draw_steps("ring_timeline", {"plain all-gather": timed(False), "ring": timed(True)})
    for name, sizes in (("long", (65_536, 8192, 32_768)), ("wide", (4096, 4096, 131_072))):
        say(**{name: f"{timed(True, CALIBRATED, *sizes).seconds / timed(False, CALIBRATED, *sizes).seconds:.2f}"})
    return table


@kept("counted in the program", "predicted, idealised", "compiled")
def lensed() -> Table:
    """Both programs by every analysis that counts or predicts."""
    reports = compile_all([gather_matmul(ring, platform="cuda") for ring in BOTH.values()], machine(IDEAL))
    columns, micro = [], lambda seconds: f"{1e6 * seconds:.1f} µs"
    for ring, report in zip(BOTH.values(), reports, strict=True):
        program = gather_matmul(ring)
        module, time = parse(program), timed(ring)
        program_costs = costs(module)
        assert report.schedule is not None
        columns.append(
            {
                "costs: FLOPs of a device": f"{program_costs.flops / 1e9:.1f} GFLOP",
                "costs: sent by a device": f"{sum(c.total_bytes for c in program_costs.collectives) / 2**20:g} MiB",
                "memory: temporaries": f"{memory(module, program).temporaries / 2**20:.0f} MiB",
                "compiled: temporaries": f"{report.memory.temporaries / 2**20:.0f} MiB",
                "timeline: a step": micro(time.seconds),
                "timeline: exposed": micro(time.exposed_seconds),
                "compiled: the schedule, replayed": micro(report.replay.seconds),
                "compiled: exposed": micro(sum(report.replay.exposed.values())),
                "compiled: copying": micro(copying(report.schedule, machine(IDEAL))),
                "compiled: collectives": f"{sum(c.count for c in report.collectives)}",
                "compiled: coverage": f"{report.coverage:.0%}",
            }
        )
    table = Table("", "plain s", "ring s")
    for name in columns[0]:
        table.add(name, *(column[name] for column in columns))
    replayed = [report.replay.seconds for report in reports]
    say(sees=f"{timed(True).seconds / timed(False).seconds:.2f}", replays=f"{replayed[1] / replayed[0]:.2f}")
    return table


@example("measured", "predicted, calibrated", "compiled")
def disagree() -> Table:
    """Timeline and replay of the six recorded runs, split."""
    columns = (
        "measured g",
        "timeline: products .2f",
        "others .2f",
        "replay: products .2f",
        "its others .2f",
        "of these, copies .2f",
    )
    table, gaps = (Table("seconds, and GB", *columns, "timeline: GB moved .0f", "replay .0f"), recorded().gaps)
    for gap in gaps:
        line, real = gap.timeline, gap.compiled
        assert real is not None
        parts = line.products, line.others, real.products, real.others, real.copies, line.moved / 1e9, real.moved / 1e9
        table.add(gap.name, gap.measured, *parts)
    assert [gap.compiled.again > 0 for gap in gaps if gap.compiled] == [True] + [False] * (len(gaps) - 1)
    first, inner, block = gaps[0], gaps[3], gaps[4]
    less = [100 * (1 - gap.compiled.moved / gap.timeline.moved) for gap in gaps[2:] if gap.compiled]
    assert len(less) == 4 and min(less) > 0
    assert first.compiled is not None
    flops, slower = block.timeline.flops / inner.timeline.flops, inner.measured / block.measured
    say(
        less=f"{min(less):.0f} to {max(less):.0f}",
        again=f"{first.compiled.flops / 1e12:.1f}",
        once=f"{first.timeline.flops / 1e12:.1f}",
        risen=f"{100 * (flops * slower - 1):.0f}",
        inner=f"{inner.timeline.flops / 1e12:.1f}",
        block=f"{block.timeline.flops / 1e12:.1f}",
        mfu=f"{100 * (1 - slower):.0f}",
        inner_s=inner.measured,
        block_s=block.measured,
    )
    return table


GUIDED = """\
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

@jax.jit
def step(params, x):
    def loss(params):
        h = jax.lax.with_sharding_constraint(x @ params["up"], NamedSharding(mesh, P("data", "model")))
        return jnp.mean((jax.nn.gelu(h) @ params["down"]) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))
"""
GIVEN = "{'up': f32[4096@data, 16384@model], 'down': f32[16384@model, 4096@data]}, f32[8192@data, 4096]"


@example("predicted, idealised", guided="diagram")
def guided() -> dict[str, str]:
    """A step whose shardings are left to the compiler, predicted from the command line."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "guided.py"
        file.write_text(GUIDED)
        output = printed("predict", f"{file}:step", "--args", GIVEN)
    blocks = output.split("\n\n")
    return {"guided": GUIDED, "guided_command": f'meshcraft predict guided.py:step --args \\\n  "{GIVEN}"',
            "guided_told": "\n\n".join((blocks[0], blocks[-1]))}  # fmt: skip


@example("predicted, idealised")
def corpus() -> Table:
    """Public programs: the result for each."""
    rows = recorded_corpus()
    heads = ("repository", "function", "an example of")
    table = Table(heads, "devices d", "FLOPs s", "temporaries s", "time s")

    def error(value: float | None) -> str:
        return "" if value is None else "< 0.1%" if abs(value) < 1e-3 else f"{value:+.1%}"

    def named(row: Row) -> str:
        return f"`{row.function}` of {row.path.rpartition('/')[0].rpartition('/')[2] or row.path}"

    accepted = [row for row in rows if row.accepted]
    for row in accepted:
        errors = error(row.flops_error), error(row.memory_error), error(row.time_error)
        table.add((row.repository, named(row), row.style), row.devices, *errors)
    public: dict[str, Any] = {"programs": len(rows), "accepted": len(accepted)}
    public["repositories"] = len({row.repository for row in rows})
    public["refused"] = "; ".join(f"{named(row)}, {row.refused}" for row in rows if not row.accepted)
    for name in ("flops", "memory", "time"):
        errors = [(abs(e), named(row)) for row in accepted if (e := getattr(row, f"{name}_error")) is not None]
        mean, (worst, of) = sum(e for e, _ in errors) / len(errors), max(errors)
        digits = 2 if name == "flops" else 0
        public[name] = (
            f"{100 * mean:.{digits}f}% over {len(errors)} programs (at worst {100 * worst:.{digits}f}%, {of})"
        )
    say(public=public)
    return table


def refusal(local, outside=lambda y: y):
    """The analyses' refusal of a program, with ``cell:line`` in place of the line."""
    mesh, spec = {"data": 4}, P("data")
    mapped = jax.shard_map(local, mesh=abstract_mesh(mesh), in_specs=spec, out_specs=spec)
    inputs = {"x": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    try:
        module = parse(
            export(
                lambda x: {"y": outside(mapped(x))},
                inputs,
                {"x": spec},
                mesh=mesh,
                out_specs={"y": spec},
                locate=lambda file: "step" if file == __file__ else None,
            )
        )
        costs(module)
        timeline(module, machine(IDEAL))
    except ProgramError as error:
        return textwrap.fill(re.sub(r"step:\d+", "cell:line", str(error)), 96)
    raise AssertionError("this should have been refused")


@kept("run on CPU devices", slow=True)
def functions() -> dict[str, Any]:
    """The treatment of every public function of the libraries, by module, and why some are refused."""
    attempts_by_name = {name: tried(name) for name in library.functions()}
    outcomes = {library.ACCEPTED: "accepted", library.BY_SIZE: "at one size", library.REFUSED: "refused"}
    table = Table("called as", "functions d", *(f"{label} d" for label in outcomes.values()), "others d")
    for module in library.MODULES:
        worst = Counter(
            attempts[-1].outcome for name, attempts in attempts_by_name.items() if name.rpartition(".")[0] == module
        )
        known = [worst[outcome] for outcome in outcomes]
        table.add(f"`{module}.…`", worst.total(), *known, worst.total() - sum(known))
    reasons = library.reasons([attempt for attempts in attempts_by_name.values() for attempt in attempts])
    lines = [
        textwrap.fill(f"{reason}: {', '.join(names)}", 110, subsequent_indent="    ")
        for reason, names in reasons.items()
    ]
    return {"functions": table, "unpriced": "\n".join(lines)}


@example("run on CPU devices")
def refused() -> str:
    table = np.arange(2**21, dtype=np.float32).reshape(2048, 1024)

    def reached_by_one(x):
        first = lax.axis_index("data") == 0
        return lax.cond(first, lambda x: lax.pcast(lax.psum(x, "data"), "data", to="varying"), lambda x: x, x)

    def called_back(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((16, 64), x.dtype), x)

    refusals = {
        "a branch on data": refusal(lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x.T @ x, lambda x: x, x)),
        "a loop until data says so": refusal(lambda x: lax.while_loop(lambda x: x[0, 0] < 9, lambda x: 2 * x, x)),
        "a callback": refusal(called_back),
        "a table computed beforehand": refusal(lambda x: x + jnp.asarray(table)[:16, :64]),
        "work outside of `shard_map`": refusal(lambda x: 2 * x, lambda y: y @ y.T @ y),
        "a collective that not everyone reaches": refusal(reached_by_one),
    }
    return "\n\n".join(f"# {name}\n{message}" for name, message in refusals.items())

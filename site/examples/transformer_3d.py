"""Three axes at once: closed forms on six meshes, the times of weight gathers, and the compiler's own partitioning."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import jax
from jax import lax
from jax.sharding import PartitionSpec as P
from showing import Table, draw_timelines, example, holdings, kept, program, realistic, say
from steps import BILLION, KEY, model_of, shapes_of, tokens

from autograder.chapters.transformer_3d.communication import gathered, parts_over_data, permuted, ticks_of
from autograder.chapters.transformer_3d.layouts import SIZES, part_bytes
from autograder.chapters.transformer_3d.mutants import gathers_in_every_tick, keeps_everything
from autograder.contract.task import Case, load
from course.budget import Sizes, flops_per_token
from course.layout import Options
from course.machines import machine
from course.mesh import abstract_mesh, shard_map_with_specs, varying
from course.model import full_loss
from course.predict import predict
from course.program import costs, export, memory, parse, timeline
from course.program.compiled import compile_for
from course.training import strategy
from solutions.transformer_3d import forward_3d, init_3d

AXES, MIB, GIB, H100 = ("data", "pipe", "tensor"), 2**20, 2**30, machine("8xH100")
TASK = load("transformer_3d").task("forward_3d")
TICKS, ONCE = "gathered in every tick", "gathered once for a repeat"
WAYS = {TICKS: gathers_in_every_tick, "gathered once, and everything kept": keeps_everything, ONCE: forward_3d}


@example("counted in the program", "counted by closed form")
def numbers() -> Table:
    """A Transformer of about a billion parameters, 32 sequences; without a pipeline, a repeat for each layer."""
    columns = (
        "resident, MiB .0f",
        "whole on data, MiB .1f",
        "gathered over data, MiB .0f",
        "permuted, MiB .0f",
        "over tensor, MiB .0f",
        "bubble, percent .1f",
    )
    table = Table("mesh", *columns)
    large = {
        "width": 2048,
        "hidden": 8192,
        "num_heads": 16,
        "num_layers": 16,
        "vocab": 32_000,
        "seq": 1024,
        "max_seq": 1024,
    }
    for mesh in ((2, 2, 2), (1, 2, 4), (4, 1, 2), (8, 1, 1), (1, 8, 1), (1, 1, 8)):
        data, pipe, tensor = mesh
        count, repeats = (4, 2) if pipe > 1 else (1, 16)
        own = {"min_size": 2**16, "num_microbatches": count, "num_repeats": repeats, "rows": 32 // data // count}
        case = Case("", dict(zip(AXES, mesh, strict=True)), SIZES.replace(**large, **own))
        resident = sum(size for size, _, _ in part_bytes(case))
        whole = resident - parts_over_data(case) if data > 1 else resident
        # 4 gathers or scatters per layer forward, again in the recomputation, and backward.
        over_tensor = 12 * 16 / pipe * (tensor - 1) / tensor * 4 * 32 // data * 1024 * 2048
        bubble = 100 * (1 - repeats * count / ticks_of(case)) if pipe > 1 else 0.0
        sizes = (size / MIB for size in (resident, whole, gathered(case), permuted(case), over_tensor))
        table.add(" x ".join(map(str, mesh)), *sizes, bubble)
    data_only, piped = table["8 x 1 x 1"], table["1 x 8 x 1"]
    assert 1.7 < piped.resident / table["2 x 2 x 2"].resident < 2.1, "holds twice as much as the others"
    assert all(table[name]["whole on data"] < 1.1 for name in ("2 x 2 x 2", "8 x 1 x 1", "4 x 1 x 2")), (
        "next to nothing"
    )
    assert data_only["gathered over data"] / data_only.resident - 7 < 0.01, "D - 1 times what is held"
    holdings(dict.fromkeys(AXES, 2), numbers_layers=((2, 4), ("pipe", None), ("stage", "its layers")))
    holdings({"data": 2, "tensor": 2}, numbers_up=((4, 8), (None, ("tensor", "data")), ("width", "hidden")))
    say(head=f"{32_000 * 2048 / (12 * 2048**2):.1f}", millions=f"{BILLION.count / 1e6:.0f}")
    return table


def located(file):
    return "transformer_3d" if file.endswith(("solutions/transformer_3d.py", "transformer_3d/mutants.py")) else None


def exposed_over_data(module, where):
    """Milliseconds of a step, and the additional time due to ``data``."""
    step = timeline(module, where)
    return step, 1e3 * step.seconds, 1e3 * (step.seconds - timeline(module, where, free=("data",)).seconds)


@example("predicted, idealised", "predicted, calibrated", by_axis="predicted, idealised")
def gathers() -> dict[str, Table]:
    case = realistic(TASK)
    steps = {}
    table = Table(
        "", "step, ms .2f", "calibrated .2f", "over data, ms .2f", "sent over data, MiB ,.0f", "temporaries, MiB ,.0f"
    )
    for name, function in WAYS.items():
        exported = program(TASK, function, case, located)
        module = parse(exported)
        step, *times = exposed_over_data(module, machine(TASK.machine))
        times.insert(1, 1e3 * timeline(module, machine(f"{TASK.machine}-calibrated")).seconds)
        sent = sum(c.total_bytes for c in costs(module).collectives if c.axes == ("data",))
        table.add(name, *times, sent / MIB, memory(module, exported).temporaries / MIB)
        steps[name] = step
    draw_timelines("gathers", ticks=steps[TICKS], repeats=steps[ONCE])
    by_axis = Table("exposed in the last one, over", "ms, on the device that waits longest .2f")
    for axes, seconds in sorted(step.exposed.items(), key=lambda item: -item[1]):
        if seconds > 1e-5:
            by_axis.add(f"`{axes}`", 1e3 * seconds)
    names = "8xH100", "8xA5000"
    many = Table(
        "with 8 microbatches", "8xH100, ms .2f", "over data, ms .2f", "8xA5000, ms .2f", "over data there, ms .2f"
    )
    for name in (TICKS, ONCE):
        module = parse(program(TASK, WAYS[name], realistic(TASK, num_microbatches=8), located))
        many.add(name, *(x for where in names for x in exposed_over_data(module, machine(where))[1:]))
    ticks, all_kept, once = table.rows.values()
    many_ticks, many_once = many.rows.values()
    assert ticks["sent over data"] > 2 * once["sent over data"] == 2 * all_kept["sent over data"], "sends twice as much"
    assert all_kept.calibrated < once.calibrated < once.step / ticks.step * ticks.calibrated
    assert all_kept.calibrated / ticks.calibrated < all_kept.step / ticks.step
    assert 0.96 * ticks.step < once.step < 0.99 * ticks.step, "a little shorter"
    assert once.temporaries > ticks.temporaries, "more is held"
    assert all_kept.temporaries > 1.8 * once.temporaries and all_kept["over data"] < once["over data"]
    assert many_ticks["over data"] > 2.3 * ticks["over data"] and many_once["over data"] < 1.2 * once["over data"], (
        "hardly at all"
    )
    assert many_ticks["8xH100"] > 1.1 * many_once["8xH100"], "a tenth and more"
    for name, mesh in (("cube", (2, 2, 2)), ("flat", (4, 1, 2))):
        repeats, microbatches, rings = MESHES[mesh]
        assert rings, "products are rings"
        say(**{f"{name}_repeats": repeats, f"{name}_microbatches": microbatches})
    say(
        times=f"{many_ticks['8xA5000'] / many_once['8xA5000']:.2f}", shorter=f"{100 * (1 - once.step / ticks.step):.0f}"
    )
    return {"gathers": table, "by_axis": by_axis, "many": many}


@dataclass(frozen=True)
class Config:
    """A model, the number of sequences per step, and the size below which a leaf is not split over ``data``."""

    sizes: Sizes
    least: int
    sequences: int = 32


LARGE = Config(BILLION, 2**16)
# By mesh: repeats, microbatches, and whether products are rings.
MESHES = {
    (2, 2, 2): (8, 4, True),
    (1, 2, 4): (4, 4, False),
    (4, 1, 2): (16, 2, True),
    (8, 1, 1): (16, 2, False),
    (1, 8, 1): (2, 16, False),
    (1, 1, 8): (16, 4, False),
}


@dataclass(frozen=True)
class Step:
    """A loss with its gradient, as a function of ``params`` and ``batch``, and the layout of these."""

    function: Callable[[Any, Any], Any]
    shapes: Any
    specs: Any
    rows: P
    results: Any
    mesh: dict[str, int]

    def exported(self, config, platform="cpu"):
        inputs = {"params": self.shapes, "batch": tokens(config.sequences, config.sizes.seq)}
        specs = {"params": self.specs, "batch": self.rows}
        return export(
            self.function,
            inputs,
            specs,
            mesh=self.mesh,
            out_specs=self.results,
            roles={"params": "state"},
            platform=platform,
        )


def stacks_and_specs(config, mesh, repeats):
    """Shapes of the parameters in stages, and their specs."""
    all_specs, sizes = [], config.sizes
    begin = shard_map_with_specs(
        lambda params: init_3d(params, repeats, config.least, *AXES),
        abstract_mesh(dict(zip(AXES, mesh, strict=True))),
        (P(),),
    )

    def placed(params):
        parts, specs = begin(params)
        all_specs.append(specs)
        return parts

    return jax.eval_shape(placed, shapes_of(model_of(sizes), sizes.heads)), all_specs[0]


def ours(config, mesh):
    """By ``forward_3d``; every device returns its own copy of its blocks."""
    (repeats, microbatches, rings), sizes = MESHES[mesh], dict(zip(AXES, mesh, strict=True))
    shapes, specs = stacks_and_specs(config, mesh, repeats)
    options = Options(num_microbatches=microbatches, rings=rings)

    def local(params, batch):
        loss, gradients = jax.value_and_grad(forward_3d)(varying(params, AXES), specs, batch, KEY, options, *AXES)
        return {"loss": lax.pmean(loss, "data"), "gradients": jax.tree.map(lambda leaf: leaf[None], gradients)}

    results = {"loss": P(), "gradients": P(AXES)}
    mapped = jax.shard_map(local, mesh=abstract_mesh(sizes), in_specs=(specs, P("data")), out_specs=results)
    return Step(lambda params, batch: mapped(params, batch), shapes, specs, P("data"), results, sizes)


def placed(config, mesh):
    """The single device's loss of the same arrays, with only their layout given to the compiler.

    Each axis becomes axes of size 2: the compiler's groups may be a part of one, and need a name.
    """
    shapes, specs = stacks_and_specs(config, mesh, MESHES[mesh][0])
    sizes, model = config.sizes, model_of(config.sizes)
    names = {
        axis: [f"{axis}{i}" for i in range(size.bit_length() - 1)] or [axis]
        for axis, size in zip(AXES, mesh, strict=True)
    }

    def loss_of(params, batch):
        layers = jax.tree.map(lambda leaf: leaf.reshape(sizes.layers, *leaf.shape[3:]), params["layers"])
        qkv, out = (layers["attention"][name]["kernel"] for name in ("qkv", "out"))
        layers["attention"] = {
            "qkv": {"kernel": qkv.reshape(sizes.layers, sizes.width, -1)},
            "out": {"kernel": out.reshape(sizes.layers, -1, sizes.width)},
        }
        return full_loss(replace(model, layer=jax.checkpoint(model.layer)), {**params, "layers": layers}, batch)

    def step(params, batch):
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        return {"loss": loss, "gradients": gradients}

    def parted(spec):
        entries = [entry if isinstance(entry, tuple) else () if entry is None else (entry,) for entry in spec]
        return P(*[tuple(part for axis in axes for part in names[axis]) or None for axes in entries])

    specs = jax.tree.map(parted, specs, is_leaf=lambda spec: isinstance(spec, P))
    parts = {part: min(2, size) for axis, size in zip(AXES, mesh, strict=True) for part in names[axis]}
    return Step(step, shapes, specs, P(tuple(names["data"])), {"loss": P(), "gradients": specs}, parts)


def guided(config, mesh):
    """The strategy ``compiler`` of ``meshcraft train``, which treats the devices of ``pipe`` as more of ``data``."""

    class Sizes3d(strategy.ModelSizes):
        """Sizes of a model whose vocabulary is not the 256 bytes."""

        def model(self):
            return model_of(config.sizes)

    (data, pipe, tensor), s = mesh, config.sizes
    shape, sizes = {"data": data * pipe, "tensor": tensor}, Sizes3d(s.width, s.inner, s.layers, s.heads, s.seq)
    compiler_strategy = strategy.compiler(
        sizes, abstract_mesh(shape), strategy.StrategyOptions(remat=True, min_size=config.least)
    )

    def step(params, batch):
        loss, gradients = compiler_strategy.loss_and_gradients(params, batch)
        return {"loss": loss, "gradients": gradients}

    return Step(
        step,
        sizes.shapes(),
        compiler_strategy.specs,
        compiler_strategy.batch_spec,
        {"loss": P(), "gradients": compiler_strategy.specs},
        shape,
    )


def compiled(step, config=LARGE):
    """Step and exposed milliseconds, and GiB of temporaries, of the compiler's schedule."""
    report = compile_for(step.exported(config, "cuda"), H100, time_limit=3000)
    return 1e3 * report.replay.seconds, 1e3 * sum(report.replay.exposed.values()), report.memory.temporaries / GIB


@kept("compiled", slow=True)
def peers() -> Table:
    """Ours, placed and guided: compiled for 8 H100s."""
    table = Table(("data x pipe x tensor", "step"), "ms .1f", "exposed, ms .1f", "temporaries, GiB .2f")
    for mesh in MESHES:
        name = " x ".join(map(str, mesh))
        for kind, make in {"ours": ours, "placed": placed, "guided": guided}.items():
            table.add((name, kind), *compiled(make(LARGE, mesh)))
        our_row, placed_row, guided_row = (table[f"{name}, {kind}"] for kind in ("ours", "placed", "guided"))
        assert our_row.ms < placed_row.ms and our_row.temporaries < placed_row.temporaries, name
        assert (our_row.ms < guided_row.ms) == (name != "1 x 8 x 1"), name
        assert (our_row.temporaries < guided_row.temporaries) == (name != "8 x 1 x 1"), name
    assert table["8 x 1 x 1, ours"].temporaries < 1.1 * table["8 x 1 x 1, guided"].temporaries, "hardly more"
    assert table["1 x 8 x 1, placed"].ms / table["1 x 8 x 1, ours"].ms > 5
    guided_row, ticks, useful = table["1 x 8 x 1, guided"], 2 * 16 + 7, 2 * 16
    bound = ticks / useful * (guided_row.ms - guided_row.exposed)
    assert guided_row.ms < bound, "the bound of a pipeline of eight"
    say(idle=ticks - useful, ticks=ticks, useful=useful, bound=f"{bound:.1f}")
    return table


@kept("predicted", "compiled", slow=True)
def barrier() -> Table:
    """One microbatch, so that ticks are not a loop: recomputation with and without a barrier around it."""
    table = Table(
        ("data x pipe x tensor", "barrier"),
        "liveness, GiB .2f",
        "compiled, ms .1f",
        "exposed, ms .1f",
        "temporaries, GiB .2f",
    )

    def add(mesh, with_barrier):
        step = ours(LARGE, mesh)
        exported = step.exported(LARGE)
        temporaries = memory(parse(exported), exported).temporaries / GIB
        table.add((" x ".join(map(str, mesh)), with_barrier), temporaries, *compiled(step))

    with patch.dict(MESHES, {(4, 1, 2): (16, 1, False), (8, 1, 1): (16, 1, False)}):
        add((4, 1, 2), "yes")
        add((8, 1, 1), "yes")
        with patch.object(lax, "optimization_barrier", lambda operand: operand):
            add((4, 1, 2), "no")
    return table


def fsdp_table():
    return Table(
        ("data x pipe x tensor", "fsdp"),
        "predicted: ms .1f",
        "exposed, ms .1f",
        "MFU .0%",
        "parts, GiB .2f",
        "temporaries, GiB .2f",
        "compiled: ms .1f",
        "exposed there, ms .1f",
        "temporaries there, GiB .2f",
    )


def fsdp_row(table, mesh, fsdp, by_compiler):
    """A mesh with its leaves split over ``data`` or whole there."""
    config = LARGE if fsdp else replace(LARGE, least=10**12)
    step, flops = ours(config, mesh), flops_per_token(BILLION) * 32 * BILLION.seq
    exported = step.exported(config)
    prediction = predict(exported, H100, model_flops=flops)
    state_bytes = sum(leaf.local_bytes(step.mesh) for leaf in exported.inputs if leaf.role == "state")
    figures = compiled(step, config) if by_compiler else [math.nan] * 3
    table.add(
        (" x ".join(map(str, mesh)), "on" if fsdp else "off"),
        1e3 * prediction.timeline.seconds,
        1e3 * prediction.timeline.exposed_seconds,
        prediction.mfu,
        state_bytes / GIB,
        prediction.memory.temporaries / GIB,
        *figures,
    )


@kept("predicted, idealised", "compiled", slow=True)
def billion() -> Table:
    """Two meshes, with FSDP and without; ``again`` recomputes a row."""
    table = fsdp_table()
    for mesh, part in (((2, 2, 2), 2), ((4, 1, 2), 4)):
        for fsdp in (True, False):
            fsdp_row(table, mesh, fsdp, True)
        on, off = list(table.rows.values())[-2:]
        assert abs(off.parts / on.parts - part) < 0.05 * part, "halves, and quarters"
        assert on["predicted: ms"] < off["predicted: ms"] and on["compiled: ms"] < off["compiled: ms"]
        assert on.temporaries < off.temporaries and (on["temporaries there"] > off["temporaries there"]) == (
            mesh == (2, 2, 2)
        )
    rows = table.rows.values()
    errors = [row["predicted: ms"] / row["compiled: ms"] - 1 for row in rows]
    exposed = [(row.exposed - row["exposed there"]) / (row["predicted: ms"] - row["compiled: ms"]) for row in rows]
    assert 0 < min(errors) < max(errors) < 0.12 and max(exposed) < 1 / 2, (
        "predicted longer, and mostly not for what is exposed"
    )
    say(worst=f"{100 * max(errors):.0f}")
    return table


def again():
    """A row of ``billion`` without the compiler."""
    table = fsdp_table()
    fsdp_row(table, (2, 2, 2), True, False)
    return table

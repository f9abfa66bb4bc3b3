"""A Transformer over ``data`` and ``tensor``: what rings hide, two kinds of block, split logits, and a billion."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from showing import Table, by_compiler, draw_timelines, example, holdings, kept, look, program, realistic, say
from steps import BILLION, KEY, over_tensor

from autograder.chapters.tp_transformer.mutants import gathers_and_scatters_whole, gathers_logits
from autograder.contract.task import load
from course.budget import flops_per_token
from course.data import token_batch
from course.layout import tensor_specs
from course.machines import machine
from course.mesh import make_mesh, varying
from course.model import full_loss, split_heads, transformer
from course.planning import Choice
from course.predict import predict
from course.program import costs, parse, timeline
from course.program.compiled import compile_for
from solutions import tp_transformer as ours
from solutions.async_tensor_parallel import matmul_ring_scatter, ring_gather_matmul

CHAPTER, H100, RINGS = load("tp_transformer"), machine("8xH100"), (ring_gather_matmul, matmul_ring_scatter)
BLOCKS = {"sequential": "tp_transformer_block", "parallel": "parallel_transformer_block"}
LARGE = CHAPTER.task("parallel_transformer_block")
LONG = {"seq": 1024, "max_seq": 1024}
USUAL: dict[str, Any] = {"width": 2048, "hidden": 8192, "rows": 8, **LONG}
WIDE: dict[str, Any] = {"width": 4096, "hidden": 16384, "num_heads": 32, "rows": 4, **LONG}
DRAWN = {"sequential, single": "before", "parallel, single": "beside", "parallel, rings": "after"}


@example("counted by closed form")
def numbers() -> dict[str, Table]:
    """Communication that rings can hide in a layer: 72 d^2/n FLOPs per token, for 8 (n-1)/n d numbers sent."""
    holdings(
        {"data": 2, "tensor": 4},
        numbers_activations=((4, 8), ("data", "tensor"), ("sequences", "tokens")),
        numbers_table=((8, 4), ("tensor", None), ("vocabulary", "width")),
        numbers_logits=((8, 8), ("data", "tensor"), ("tokens", "vocabulary")),
    )
    sent = Table("FLOPs for each number sent", *(f"n={n} ,.0f" for n in (2, 4, 8)))
    for width in (2048, 4096, 8192, 16384):
        sent.add(f"width {width:,}", *(9 * width / (n - 1) for n in (2, 4, 8)))
    hidden = Table("machine", "FLOPs while it sends a number ,.0f")
    for name, dtype, size in (("8xH100", "f32", 4), ("8xH100", "bf16", 2), ("8xA100", "bf16", 2)):
        where = machine(name)
        hidden.add(f"{name}, {dtype}", where.peak(dtype) * size / where.bandwidth_of(tuple(range(8))))
    return {"sent": sent, "hidden": hidden}


@example("predicted, idealised", "predicted, calibrated")
def blocks() -> Table:
    """One layer on eight H100s, forward and backward, sent whole and by rings."""
    columns = "sent, MiB .0f", "idealised H100, ms .2f", "exposed .2f", "calibrated H100, ms .2f", "exposed there .2f"
    table, drawn = Table(("width", "block", "sends"), *columns), {}
    for width, sizes in (("2,048", USUAL), ("4,096", WIDE)):
        for parallel, (kind, name) in enumerate(BLOCKS.items()):
            block = getattr(ours, name)

            def by_rings(params, x, key, rate, gather_matmul, matmul_scatter, axis_name, block=block):
                return block(params, x, key, rate, *RINGS, axis_name)

            for way, function in (("single", block), ("rings", by_rings)):
                module = parse(program(CHAPTER.task(name), function, realistic(LARGE, parallel=parallel, **sizes)))
                timelines = [timeline(module, where) for where in (H100, machine("8xH100-calibrated"))]
                times = [1e3 * x for t in timelines for x in (t.seconds, t.exposed_seconds)]
                table.add((width, kind, way), sum(c.total_bytes for c in costs(module).collectives) / 2**20, *times)
                if sizes is WIDE and f"{kind}, {way}" in DRAWN:
                    drawn[DRAWN[f"{kind}, {way}"]] = timelines[0]
            whole, rings = (table[f"{width}, {kind}, {way}"] for way in ("single", "rings"))
            assert rings.exposed < 0.56 * whole.exposed and rings["calibrated H100"] > whole["calibrated H100"]
        sequential, parallel = (table[f"{width}, {kind}, single"] for kind in BLOCKS)
        assert parallel.sent == sequential.sent / 2, "half of the bytes"
    draw_timelines("blocks", **drawn)
    step = {name: row["idealised H100"] for name, row in table.rows.items()}
    narrow, wide = (step[f"{w}, parallel, single"] / step[f"{w}, sequential, single"] for w in ("2,048", "4,096"))
    assert narrow < wide and round(table["4,096, parallel, rings"].exposed, 2) == 0
    assert 1.05 < step["2,048, sequential, rings"] / step["2,048, sequential, single"] < 1.07
    return table


@kept("predicted", "compiled")
def logits() -> Table:
    """Memory on a device for the loss of 8,192 tokens with 32,000 logits each."""
    task = CHAPTER.task("vocab_parallel_loss")
    ways = {"logits gathered": gathers_logits, "vocabulary in parts": ours.vocab_parallel_loss}
    sizes, table = (
        realistic(task).sizes,
        Table("", "largest array, MiB ,.0f", "temporaries, MiB ,.0f", "compiled, MiB ,.0f"),
    )
    all_logits = 4 * sizes.rows * sizes.seq * sizes.vocab / 2**20
    for name, report in by_compiler(task, ways).items():
        memory = look(task, ways[name]).memory
        assert memory.largest
        table.add(
            name,
            *(
                size / 2**20
                for size in (4 * math.prod(memory.largest.shape), memory.temporaries, report.memory.temporaries)
            ),
        )
    gathered, parts = table.rows.values()
    assert (
        gathered["largest array"] == all_logits
        and parts["largest array"] == all_logits / 8
        and parts.compiled < all_logits
    )
    assert gathered.temporaries > 4 * parts.temporaries and gathered.compiled > 4 * parts.compiled
    say(every=f"{all_logits:,.0f}")
    return table


# By rule: the treatment of a split leaf's gradient, and of the shares of a whole one.
RULES = {
    "added up": (lambda g: g, lambda shares: shares.sum(0)),
    "averaged": (lambda g: g, lambda shares: shares.mean(0)),
    "as for an MLP": (lambda g: g / 4, lambda shares: shares.mean(0)),
}


def raw_gradients(params, batch, specs):
    """Gradient of the loss on each device of 2 x 4 for its position on ``data``."""

    def local(params, batch):
        def loss_of(params):
            x = ours.vocab_parallel_embed(params["embed"], batch["inputs"], "tensor")
            layer = jax.tree.map(lambda leaf: leaf[0], params["layers"])
            x = ours.tp_transformer_block(layer, x, KEY, 0.0, *RINGS, "tensor")
            return ours.vocab_parallel_loss(params["head"], x, batch["targets"], RINGS[0], "tensor")

        return jax.tree.map(lambda g: g[None, None], jax.grad(loss_of)(varying(params, ("data", "tensor"))))

    out_specs = jax.tree.map(lambda spec: P("data", None, *spec) if "tensor" in spec else P("data", "tensor"), specs)
    mesh = make_mesh({"data": 2, "tensor": 4})
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(specs, P("data")), out_specs=out_specs))(params, batch)


@example("run on CPU devices")
def scale() -> Table:
    """Three rules for the gradients of one step, and their effect on each leaf, compared with a single device."""
    model = transformer(width=16, hidden=24, num_layers=1, num_heads=4, vocab=32, max_seq=8)

    @jax.jit
    def moved(key):  # zero biases and unit norms would hide the effect of a rule
        def move(leaf):
            return leaf + 0.1 * jnp.sin(1.0 + jnp.arange(leaf.size).reshape(leaf.shape))

        return jax.tree.map(move, model.init(key))

    params = moved(KEY)
    batch = token_batch(0, 0, batch=4, seq=8, vocab=32)

    def apart(params):
        return {**params, "layers": {**params["layers"], "attention": split_heads(params["layers"]["attention"], 4)}}

    expected = apart(jax.jit(jax.grad(lambda params: full_loss(model, params, batch)))(params))
    specs = tensor_specs(apart(params), "tensor")
    leaves = map(jax.tree.leaves, (raw_gradients(apart(params), batch, specs), specs))
    table, norms = Table(("leaf", "is"), *(f"{name} .3f" for name in RULES)), np.zeros(3)
    for (path, right), raw, spec in zip(jax.tree.leaves_with_path(expected), *leaves, strict=True):
        split, mean, ratios = "tensor" in spec, np.mean(raw, axis=0), []
        for i, (of_split, of_whole) in enumerate(RULES.values()):
            gradient = of_split(mean[0]) if split else of_whole(mean)
            ratios.append(float(np.vdot(gradient, right) / np.vdot(right, right)))
            assert np.allclose(gradient, ratios[-1] * right, atol=1e-5)
            norms[i] += float(np.vdot(gradient, gradient))
        table.add((jax.tree_util.keystr(path, simple=True, separator="/"), "split" if split else "whole"), *ratios)
        assert np.allclose(ratios, [1, 1, 0.25] if split else [1, 0.25, 0.25], atol=5e-4)
    whole = sum(float(np.vdot(g, g)) for g in jax.tree.leaves(expected))
    table.add(("norm over all leaves", ""), *np.sqrt(norms / whole))
    return table


def mesh_row(table, way, kind, data, tensor, compiled):
    """A whole step of 32 sequences, by the analyses and by the GPU compiler."""
    flops, parallel = flops_per_token(BILLION) * 32 * BILLION.seq, kind == "parallel"
    step = ours.tp_transformer_step if way == "rings" else gathers_and_scatters_whole

    def exported(platform):
        return over_tensor(
            BILLION, Choice(data, 1, tensor, 1, 1, "none"), 32, step=step, parallel=parallel, platform=platform
        )

    prediction = predict(exported("cpu"), H100, model_flops=flops)
    time, figures = prediction.timeline, [math.nan] * 3
    if compiled:
        report = compile_for(exported("cuda"), H100)
        figures = [
            1e3 * report.replay.seconds,
            1e3 * sum(report.replay.exposed.values()),
            report.memory.temporaries / 2**30,
        ]
    table.add(
        (f"{data} x {tensor}", kind, way if tensor > 1 else "-"),
        1e3 * time.seconds,
        1e3 * time.exposed_seconds,
        prediction.mfu,
        prediction.memory.temporaries / 2**30,
        *figures,
    )


@kept("predicted, idealised", "compiled", slow=True)
def billion() -> Table:
    """About a billion parameters on eight simulated H100; ``again`` recomputes a row."""
    table = meshes()
    for data, tensor in ((8, 1), (4, 2), (2, 4), (1, 8)):
        for kind in BLOCKS:
            for way in ("single", "rings") if tensor > 1 else ("rings",):
                mesh_row(table, way, kind, data, tensor, True)
    rows = table.rows.values()
    apart = [abs(row["compiled: step"] / row.step - 1) for row in rows]
    beyond = [abs(row["temporaries there"] / row.temporaries - 1) for row in rows]
    assert max(beyond) < 0.11
    say(apart=f"{100 * max(apart):.0f}", beyond=f"{100 * max(beyond):.0f}")
    for kind in BLOCKS:
        whole = {name: row for name, row in table.rows.items() if kind in name and "rings" not in name}
        orders = [
            sorted(whole, key=lambda name, column=column: whole[name][column]) for column in ("step", "compiled: step")
        ]
        assert orders[0] == orders[1] and orders[0][0][:5] == "4 x 2" and orders[0][-1][:5] == "1 x 8"
    rings, side_by_side, in_turn = (
        table[f"1 x 8, {name}"] for name in ("parallel, rings", "parallel, single", "sequential, single")
    )
    assert (
        rings.step < side_by_side.step < 0.85 * in_turn["compiled: step"]
        and rings["compiled: step"] > side_by_side["compiled: step"]
    )
    say(count=f"{BILLION.count / 1e9:.2f}", state=f"{4 * BILLION.count / 2**30:.2f}")
    return table


def meshes():
    return Table(
        ("data x tensor", "block", "sends"),
        "step, ms .1f",
        "exposed, ms .1f",
        "MFU .0%",
        "temporaries, GiB .2f",
        "compiled: step, ms .1f",
        "exposed there, ms .1f",
        "temporaries there, GiB .2f",
    )


def again():
    """A row of ``billion`` without the compiler."""
    table = meshes()
    mesh_row(table, "rings", "parallel", 1, 8, False)
    return table

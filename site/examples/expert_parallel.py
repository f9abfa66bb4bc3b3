"""The layer of ``expert_parallel``: the cost of masks, transfers and their overlap, and the balance of routers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from showing import (
    Table,
    block,
    compiled,
    diagram,
    draw,
    draw_steps,
    example,
    kept,
    line,
    look,
    over,
    realistic,
    say,
    sent,
    wrong,
)

from autograder.chapters.expert_parallel.wrapping import expert_specs, layer_params
from autograder.contract.task import load
from course.data import token_batch
from course.machines import H100, machine, scaled
from course.mesh import make_mesh, varying
from course.moe import balance_and_z, expert_mlp, moe_loss, moe_transformer
from course.program.compiled import DEFAULT_FLAGS, compile_all
from course.render import schedule_svg
from course.render.svg import AXES as HUES
from course.render.svg import MATMUL, text
from course.schedules import dualpipe
from solutions.expert_parallel import combine, dispatch, moe_layer, moe_step, overlapped_moe, route

CHAPTER = load("expert_parallel")
LAYER, CHUNKED, MOVED = (CHAPTER.task(name) for name in ("moe_layer", "overlapped_moe", "dispatch"))
WRONG = wrong("expert_parallel")
ALL, TWO, FOUR = "all places at once", "2 chunks", "4 chunks"
AXES = ("data", "expert")


@example()
def there_and_back() -> None:
    """Two devices with four tokens and one expert each, one choice per token, and the places that ``route`` assigns."""
    all_choices, hues, rows = ((0, 1, 0, 0), (1, 0, 1, 0)), (MATMUL, HUES[0]), 28
    parts = [text(head, x, 14, weight="600") for head, x in (("tokens", 0), ("places", 172), ("results", 324))]
    empty = {(expert, device, place) for expert in range(2) for device in range(2) for place in range(2)}

    def top(device, row):
        return 44 + device * (4 * rows + 30) + row * rows

    for device, choices in enumerate(all_choices):
        parts += [
            text(f"{label} {device}", x, top(device, 0) - 7, faint=True)
            for label, x in (("device", 0), ("expert", 172))
        ]
        _, experts, places = route(5 * jax.nn.one_hot(jnp.array(choices), 2), jnp.zeros(2), 1, 2)
        for row, (expert, place) in enumerate(zip(experts[:, 0].tolist(), places[:, 0].tolist(), strict=True)):
            name, y, fill = "abcdefgh"[4 * device + row], top(device, row), hues[device]
            chosen, result = (
                (f"{name} → {expert}", name) if place < 2 else (f"{name} → {expert} dropped", f"{name}: zero")
            )
            parts += [block(chosen, 0, y, 90, 22, fill), block(result, 324, y, 64, 22, fill)]
            if place < 2:
                to = top(expert, 2 * device + place)
                empty.remove((expert, device, place))
                parts += [line(90, y + 11, 172, to + 11, fill), block(name, 172, to, 64, 22, fill)]
                parts.append(line(236, to + 11, 324, y + 11, fill))
    ((expert, device, place),) = empty
    y = top(expert, 2 * device + place)
    frame = f'<rect x="172.5" y="{y}" width="63" height="22" fill="none" stroke="{hues[device]}" stroke-dasharray="3"/>'
    parts += [frame, text("empty", 204, y + 15, "middle")]
    description = (
        "Tokens a, c and d of device 0 choose expert 0, which has two places for that device, so d is dropped and its "
        "result is zero. Token b chooses expert 1 and leaves a place empty. The tokens of device 1 all get places."
    )
    diagram("there_and_back", (388, top(1, 4)), "Dispatch and combine on two devices", description, parts)


@example("counted in the program", "predicted")
def masks() -> Table:
    """The cost of a mask and of indices, with more and more experts but the same tokens and places in all."""
    columns = (f"{way} {column}" for way in ("mask", "indices") for column in ("product, TFLOP .2f", "memory, MiB .0f"))
    table = Table("experts", *columns)
    for experts in (16, 64, 256):
        case = realistic(MOVED, num_experts=experts, capacity=20480 // experts)
        pair = [look(MOVED, function, case) for function in (WRONG["multiplies_by_a_one_hot_mask"], dispatch)]
        figures = ((prediction.costs.flops / 1e12, prediction.memory.temporaries / 2**20) for prediction in pair)
        table.add(experts, *(figure for values in figures for figure in values))
    assert all(
        row["indices product"] == 0 and row["mask memory"] > 5 * row["indices memory"] for row in table.rows.values()
    )
    layer, masked = (look(LAYER, function) for function in (moe_layer, WRONG["multiplies_by_one_hot_masks"]))
    say(layer=f"{layer.costs.flops / 1e12:.2f}", masked=f"{masked.costs.flops / 1e12:.2f}")
    assert masked.costs.flops > 5 * layer.costs.flops
    return table


@example("counted by closed form", "counted in the program")
def travels() -> Table:
    """Bytes of a layer, forward and backward: the closed form, and what the analysis finds."""
    table = Table("devices", "places of a device, MiB .0f", "by the formula, MiB .1f", "measured, MiB .1f")
    for n in (1, 2, 4, 8):
        prediction = look(LAYER, moe_layer, realistic(LAYER, mesh={"expert": n}))
        sizes = realistic(LAYER).sizes
        places = 4 * sizes.num_experts * sizes.capacity * sizes.width / 2**20
        row = table.add(n, places, 4 * places * (n - 1) / n, sent(prediction) / 2**20)
        assert abs(row["measured"] - row["by the formula"]) < 0.01
    return table


@example("predicted, idealised")
def nodes() -> Table:
    """Sixteen devices in two nodes: experts over all of them, or inside a node with a copy on each."""
    where = scaled(H100, 16, 2)
    table = Table("mesh", "step, ms .2f", "exposed, ms .2f", "sent, MiB .0f")
    for name, mesh in {"expert=16": {"expert": 16}, "data=2 x expert=8": {"data": 2, "expert": 8}}.items():
        prediction = look(LAYER, moe_layer, realistic(LAYER, mesh=mesh), where)
        table.add(
            name, 1e3 * prediction.timeline.seconds, 1e3 * prediction.timeline.exposed_seconds, sent(prediction) / 2**20
        )
    over, inside = table["expert=16"], table["data=2 x expert=8"]
    say(nodes_times=f"{over.exposed / inside.exposed:.1f}")
    assert over.exposed > 2 * inside.exposed
    return table


@cache
def overlapped(name: str):
    chunks = {ALL: 1, TWO: 2, FOUR: 4}[name]
    return look(CHUNKED, overlapped_moe, realistic(CHUNKED, num_chunks=chunks))


@example("predicted, idealised", "predicted, calibrated", dualpipe="counted by closed form")
def overlap() -> Table:
    table = Table("places travel", "step, ms .2f", "calibrated, ms .2f", "computing, ms .2f", "exposed, ms .2f")
    for name in (ALL, TWO, FOUR):
        timeline = overlapped(name).timeline
        computing = timeline.seconds - timeline.exposed_seconds
        figures = timeline.seconds, overlapped(name).calibrated_seconds, computing, timeline.exposed_seconds
        table.add(name, *(1e3 * seconds for seconds in figures))
    for name, picture in ((ALL, "before"), (TWO, "half"), (FOUR, "after")):
        draw_steps(f"overlap_{picture}", {"": overlapped(name).timeline})
    assert table[TWO].calibrated < table[FOUR].calibrated < table[ALL].calibrated
    assert table[FOUR].exposed < 0.4 * table[ALL].exposed and table[FOUR].step < 0.9 * table[ALL].step
    draw("dualpipe", schedule_svg(dualpipe(4, 8)))
    peak = machine("8xH100").peak("f32")
    link = machine("8xH100").bandwidth_of(tuple(range(8)))
    say(ratio=f"{7 / 8 * peak / link:,.0f}", hidden=realistic(LAYER).sizes.hidden)
    return table


def forward(name: str):
    """The forward pass alone, for the GPU compiler."""
    case, chunks = realistic(CHUNKED), {ALL: 1, FOUR: 4}[name]
    sizes, shapes = case.sizes, layer_params(case.sizes)
    x = jax.ShapeDtypeStruct((8 * sizes.tokens, sizes.width), jnp.float32)

    def local(params, x):
        params = varying(params, ("expert",))
        return {"y": overlapped_moe(params, x, sizes.k, sizes.capacity, "expert", chunks)[0]}

    ins = {"params": expert_specs(shapes, case), "x": P("expert")}
    return over(case.mesh, local, {"params": shapes, "x": x}, ins, {"y": P("expert")}, platform="cuda")


@kept("compiled")
def with_compiler() -> Table:
    reports = compile_all([forward(ALL), forward(FOUR)], machine("8xH100"), DEFAULT_FLAGS)
    columns = "overlapping a product s", "replayed, ms .2f", "exposed, ms .2f"
    return compiled("forward, compiled for 8 H100s", dict(zip((ALL, FOUR), reports, strict=True)), *columns)


# --8<-- [start:single]
@cache
def small():
    """A decoder with 8 experts on one device, its first parameters, and batches for it."""
    sizes = {"width": 32, "hidden": 32, "num_layers": 2, "num_heads": 2, "num_experts": 8, "k": 2, "vocab": 64}
    model = moe_transformer(**sizes, max_seq=16, balance=0.0, z=0.0)
    params = jax.jit(model.init)(jax.random.key(0))
    batches = [token_batch(0, i, batch=16, seq=16, vocab=64) for i in range(80)]
    return model, params, jax.tree.map(lambda *rows: jnp.stack(rows), *batches)


# --8<-- [end:single]


@example("run on CPU devices")
def nothing() -> Table:
    """The gradient of the language model's loss alone, as it reaches a router."""
    _, params, _ = small()
    layer = jax.tree.map(lambda leaf: leaf[0], params["layers"]["moe"])
    x = jax.random.normal(jax.random.key(1), (64, 32))

    def loss(kernel, gate_of):
        logits = x @ kernel
        gates, experts, places = route(logits, layer["router"]["bias"], 1, 64)
        y = combine(expert_mlp(layer["experts"], dispatch(x, experts, places, 8, 64)), gate_of(gates), experts, places)
        return jnp.mean((y - x) ** 2)

    ways = {
        "the gate as it is": lambda gates: gates,
        "no gate at all": jnp.ones_like,
        "the gate, cut off by stop_gradient": lax.stop_gradient,
        "divided by the sum of the chosen, k = 1": lambda gates: gates / gates.sum(1, keepdims=True),
    }
    table = Table("what multiplies an expert's output", "norm of the router's gradient .1e")
    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    for name, way in ways.items():
        table.add(name, float(jnp.linalg.norm(gradient(layer["router"]["kernel"], way))))
    norms = [next(iter(row.values())) for row in table.rows.values()]
    assert norms[0] > 1e-3 and all(norm < 1e-7 for norm in norms[1:])
    return table


def loads(model, params, batch):
    """The share of choices of each expert in the first layer."""
    weights = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    _, normed = model.attend(weights, model.embed(params["embed"], batch["inputs"]))
    router = weights["moe"]["router"]
    return balance_and_z(normed.reshape(-1, normed.shape[-1]) @ router["kernel"], router["bias"], model.k)[2]


def bars(groups: dict[str, np.ndarray]) -> str:
    """Bars of each group's loads, with a line at the equal share."""
    width, height, most = 150, 120, max(float(shares.max()) for shares in groups.values())
    parts = [f'<svg viewBox="0 0 {width * len(groups)} {height + 40}" role="img" aria-label="Load of each expert">']
    for at, (name, shares) in enumerate(groups.items()):
        left, step = at * width + 10, (width - 30) / len(shares)
        for i, share in enumerate(shares):
            tall = height * float(share) / most
            place = f'x="{left + i * step:.1f}" y="{height - tall:.1f}" width="{step - 2:.1f}" height="{tall:.1f}"'
            parts.append(f'<rect {place} fill="currentColor" opacity="0.6"/>')
        equal = height * (1 - 1 / len(shares) / most)
        parts.append(
            f'<line x1="{left}" x2="{left + width - 30}" y1="{equal:.1f}" y2="{equal:.1f}" stroke="currentColor" '
            f'stroke-dasharray="3"/><text x="{left}" y="{height + 18}" font-size="11" fill="currentColor">{name}</text>'
        )
    return "".join([*parts, "</svg>"])


@example("run on CPU devices")
def balanced() -> Table:
    """Load per expert in the first step, and in the last 20 of 80 steps of SGD, balanced or not.

    A batch has few tokens and the router moves while it learns, so the load after one step says little.
    """
    columns = ("whole loss .3f", "busiest expert .3f", "least busy expert .3f")
    table = Table("the last 20 of 80 steps", *columns)
    model, params, batches = small()
    params = jax.tree.map(jnp.copy, params)
    params["layers"]["moe"]["router"]["kernel"] *= jnp.geomspace(20, 1, model.num_experts)

    @jax.jit
    def train(params, weight, rate):
        weighted = replace(model, balance=weight)

        def step(params, batch):
            load = loads(model, params, batch)
            loss, gradients = jax.value_and_grad(lambda p: moe_loss(weighted, p, batch, 256))(params)
            params = jax.tree.map(lambda leaf, g: leaf - 0.5 * g, params, gradients)
            bias = params["layers"]["moe"]["router"]["bias"]
            params["layers"]["moe"]["router"]["bias"] = bias.at[0].add(rate * jnp.sign(1 / model.num_experts - load))
            return params, (loss, load)

        _, (losses, load) = lax.scan(step, params, batches)
        return losses[-20:].mean(), load[0], load[-20:].mean(0)

    groups = {}
    for name, weight, rate in (("without", 0.0, 0.0), ("with the loss", 0.3, 0.0), ("with the bias", 0.0, 0.01)):
        loss, before, load = train(params, jnp.float32(weight), jnp.float32(rate))
        groups |= {"before": np.asarray(before), name: np.asarray(load)}
        table.add(name, float(loss), float(load.max()), float(load.min()))
    draw("loads", bars(groups))
    assert table["without"]["busiest expert"] > 1.3 * table["with the loss"]["busiest expert"]
    assert table["without"]["busiest expert"] > 1.3 * table["with the bias"]["busiest expert"]
    return table


@example("run on CPU devices")
def losses() -> Table:
    """Twenty steps on four meshes, with a place for every token."""
    model, params, batches = small()
    model = replace(model, balance=0.1)
    batches = jax.tree.map(lambda leaf: leaf[:20], batches)
    specs = jax.tree.map_with_path(
        lambda path, _: P(None, "expert") if any(entry.key == "experts" for entry in path) else P(), params
    )
    by_mesh = {}
    for data, expert in ((1, 1), (1, 8), (2, 4), (4, 2)):
        mesh, capacity = make_mesh({"data": data, "expert": expert}), 256 // (data * expert)

        def local(params, batches, capacity=capacity):
            params = varying(params, AXES)
            return lax.scan(lambda p, b: moe_step(p, b, model, capacity, *AXES, jnp.float32(0.5)), params, batches)[1]

        mapped = jax.shard_map(local, mesh=mesh, in_specs=(specs, P(None, AXES)), out_specs=P())
        by_mesh[f"data={data} x expert={expert}"] = np.asarray(jax.jit(mapped)(params, batches))
    table = Table("step", *(f"{name} .5f" for name in by_mesh))
    for step in (0, 5, 10, 19):
        table.add(step, *(losses[step] for losses in by_mesh.values()))
    all_losses = np.stack(list(by_mesh.values()))
    say(apart=f"{np.max(np.abs(all_losses - all_losses[0])):.0e}")
    assert np.max(np.abs(all_losses - all_losses[0])) < 1e-4
    return table


@example("run on CPU devices")
def each_device() -> Table:
    """Two devices with a favourite expert each: the loss of each device's own tokens, and of all."""
    load, gate = np.eye(2), np.array([[0.9, 0.1], [0.1, 0.9]])
    own, over_all = 2 * np.mean(np.sum(load * gate, 1)), 2 * np.sum(load.mean(0) * gate.mean(0))
    table = Table("balancing loss", "device 0 .2f", "device 1 .2f", "mean .2f")
    table.add("of each device's own tokens", *(2 * np.sum(load * gate, 1)), own)
    table.add("loads of all, gates of its own", *(2 * np.sum(load.mean(0) * gate, 1)), over_all)
    assert own == 1.8 and over_all == 1.0
    return table

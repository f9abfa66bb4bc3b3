"""Rings of keys and values, and gathering them: time, memory, balance, and when a ring hides its transfers."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from showing import (
    Table,
    block,
    by_compiler,
    compare,
    compiled,
    diagram,
    draw_steps,
    example,
    kept,
    line,
    over,
    same_order,
    say,
    seen,
    wrong,
)

from autograder.contract.task import load
from course.attention import KEYS_AT_ONCE
from course.machines import machine
from course.model import split_heads, transformer
from course.predict import predict
from course.program import costs, parse
from course.program import memory as live_memory
from course.program.compiled import DEFAULT_FLAGS, compile_all
from course.render.svg import AXES, MATMUL, text
from solutions.context_parallel import cp_transformer_step, ring_attention, zigzag_order

TASK = load("context_parallel").task("ring_attention")
IDEAL, N = machine(TASK.machine), 8
WRONG = wrong("context_parallel")
ONE_EACH, ZIGZAG = tuple((i,) for i in range(N)), zigzag_order(N)
GATHERED, CONTIGUOUS, RING = "gather, zigzag", "ring, contiguous", "ring, zigzag"
WAYS = {
    GATHERED: (WRONG["gathers_keys_and_values"], ZIGZAG),
    "gather, contiguous": (WRONG["gathers_keys_and_values"], ONE_EACH),
    CONTIGUOUS: (ring_attention, ONE_EACH),
    RING: (ring_attention, ZIGZAG),
}
HEADS, KV_HEADS, SIZE = 16, 8, 128
MIB, GIB = 2**20, 2**30


# --8<-- [start:passes]
@cache
def passes(function, order, tokens: int = 16_384):
    """Attention forward and backward over eight devices, as a prediction."""
    q, k = (jax.ShapeDtypeStruct((1, tokens, heads, SIZE), "float32") for heads in (HEADS, KV_HEADS))
    spec = P(None, "context")

    def local(q, k, v, upstream):
        out, back = jax.vjp(partial(function, order=order, axis_name="context"), q, k, v)
        return {"out": out, "gradients": back(upstream * out)}

    inputs = {"q": q, "k": k, "v": k, "upstream": q}
    return over({"context": N}, local, inputs, dict.fromkeys(inputs, spec), {"out": spec, "gradients": spec})


# --8<-- [end:passes]


@example("predicted, idealised", "predicted, calibrated")
def ways() -> Table:
    predictions = {name: seen(passes(*way), IDEAL) for name, way in WAYS.items()}
    columns = "step, ms .2f", "calibrated .2f", "computing .2f", "exposed .2f", "times .2f", "temporaries, MiB .0f"
    table = compare("16,384 tokens, 8 H100s", predictions, *columns, base=RING)
    shown = (GATHERED, CONTIGUOUS, RING)
    draw_steps("ways", {name: predictions[name].timeline for name in shown})
    assert same_order(table, "step", "calibrated")
    assert table[RING].exposed < 0.3 * table[GATHERED].exposed
    assert table[RING].step < 0.65 * table[CONTIGUOUS].step and table[GATHERED].step < table[RING].step
    assert table[GATHERED].temporaries > 1.2 * 1.15 * table[RING].temporaries
    say(
        faster=f"{table[RING].step / table[CONTIGUOUS].step:.2f}",
        hidden=f"{table[RING].exposed / table[GATHERED].exposed:.2f}",
    )
    return table


@example("predicted")
def memory() -> Table:
    """Live temporaries of the ring, forward and backward, as sequences grow."""
    table = Table(
        "tokens", "ring, MiB .0f", "a token of a device, KiB .1f", "largest, million elements .1f", "gather, MiB .0f"
    )
    for tokens in (8192, 16_384, 32_768):
        programs = (passes(WAYS[name][0], ZIGZAG, tokens) for name in (RING, GATHERED))
        ring, gather = (live_memory(parse(program), program) for program in programs)
        each = ring.temporaries / (tokens / N) / 1024
        table.add(f"{tokens:,}", ring.temporaries / MIB, each, ring.largest_numbers / 1e6, gather.temporaries / MIB)
        assert ring.largest_numbers <= HEADS * (tokens // N) * KEYS_AT_ONCE < HEADS * tokens**2 / N
    small, middle, large = table.rows.values()
    assert large.ring < 2.1 * middle.ring and middle.ring < 3 * small.ring
    return table


@example()
def ring() -> None:
    """The owner of the keys and values that each of four devices has, step by step."""
    hues, left, wide, tall = (MATMUL, AXES[0], AXES[2], AXES[1]), 52, 84, 46
    parts = [text(f"device {d}", left + wide * d + 35, 14, "middle", weight="600") for d in range(4)]
    for step in range(4):
        y = 24 + tall * step
        parts.append(text(f"step {step}", 0, y + 17))
        for d in range(4):
            x, owner = left + wide * d, (d - step) % 4
            parts.append(block(f"K, V of {owner}", x, y, 70, 26, hues[owner]))
            if step < 3:
                ends = [(x + 35, y + 26, x + wide + 35, y + tall - 3)]
                if d == 3:  # around: out on the right, in on the left
                    ends = [(x + 35, y + 26, x + 70, y + 35), (left - 7, y + 34, left + 35, y + tall - 3)]
                parts += [line(*segment, hues[owner]) for segment in ends]
    description = (
        "In each step, every device has one block of keys and values, and sends it to the device with the next number."
    )
    diagram("ring", (388, 24 + 4 * tall), "A ring of keys and values on four devices", description, parts)


@example()
def shares() -> None:
    """Pairs of chunks that the first and the last of four devices compute, in contiguous and zigzag order."""
    parts, sentences = [], []
    for at, (name, order) in enumerate({"contiguous": WRONG["contiguous_order"](4), "zigzag": zigzag_order(4)}.items()):
        left, top, cell = 22 + 196 * at, 42, 20
        work = {device: sum(chunk + 0.5 for chunk in order[device]) for device in (0, 3)}
        owner = {chunk: device for device, chunks in enumerate(order) for chunk in chunks}
        parts.append(text(f"{name} order", left, 14, size=13, weight="600"))
        parts.append(text("queries' chunk ↓, keys' chunk →", left - 14, 32, faint=True))
        for query in range(8):
            fill = {0: MATMUL, 3: AXES[0]}.get(owner[query], "#8a94a0")
            y = top + cell * query
            parts.append(text(str(query), left - 8, y + 14, "end", faint=True))
            parts += [block("", left + cell * key, y, cell - 1, cell - 1, fill) for key in range(query)]
            corner = f"M{left + cell * query},{y}v{cell - 1}h{cell - 1.5}z"  # with its own keys, half is masked
            parts.append(f'<path d="{corner}" fill="{fill}"/>')
        for row, device in enumerate((0, 3)):
            y = top + 8 * cell + 10 + 20 * row
            parts.append(block("", left, y, 12, 12, (MATMUL, AXES[0])[row]))
            parts.append(text(f"device {device}: {work[device]:g} of 32", left + 18, y + 10))
        sentences.append(
            f"In {name} order device 0 computes {work[0]:g} of 32 pairs of chunks and device 3 {work[3]:g}."
        )
        assert sum(chunk + 0.5 for chunk in range(8)) == 32 and (work[0] == work[3]) == (name == "zigzag")
    diagram("shares", (384, 250), "Causal attention of eight chunks on four devices", " ".join(sentences), parts)


@example("counted in the program")
def balance() -> Table:
    """FLOPs of the busiest device over the mean of all, from the costs of the programs."""
    interleaved = WRONG["interleaved_order"](N)
    table = Table("order", "chunks of device 0 s", "chunks of device 7 s", "busiest over mean .2f")
    pairs = 2 * N * (2 * N + 1) / 2
    for name, order in (("contiguous", WRONG["contiguous_order"](N)), ("interleaved", interleaved), ("zigzag", ZIGZAG)):
        length = 16_384 // (2 * N)
        products = 7 * 2 * length**2 * HEADS * SIZE  # two of the forward pass, five of the backward pass
        mean = pairs / N * products
        ratio = costs(parse(passes(ring_attention, order))).flops / mean
        table.add(name, *(" and ".join(map(str, order[i])) for i in (0, N - 1)), ratio)
    assert abs(table["zigzag"]["busiest over mean"] - 1) < 0.01
    return table


@example("counted by closed form")
def hides() -> Table:
    """The fewest tokens per device for which a block of the forward pass takes as long as its transfer."""
    columns = (
        "TFLOP/s in bfloat16 .0f",
        "GB/s .0f",
        "one head of keys a query head ,.0f",
        "one for 8 ,.0f",
        "8 devices, one for 8 ,.0f",
    )
    table = Table("machine", *columns)
    for name in ("8xA100", "8xH100", "8xTPUv5e", "2x8xA100"):
        where = machine(name)
        link, peak = where.links[-1], where.peak("bf16")
        # In zigzag order a block is half masked: 2 t^2 h d FLOPs for t tokens, and 2 t h_kv d numbers of 2 bytes.
        least = 2 * peak / link.bandwidth
        table.add(name, peak / 1e12, link.bandwidth / 1e9, least, least / 8, N * least / 8)
    return table


@kept("compiled")
def with_compiler() -> Table:
    """Permutes of the ring that span a product, by the GPU compiler, with one transfer at a time and with several."""
    ways = {GATHERED: WAYS[GATHERED][0], RING: ring_attention}
    reports = by_compiler(TASK, ways)
    several = by_compiler(TASK, {RING: ring_attention}, xla_gpu_experimental_parallel_collective_overlap_limit=4)
    reports[f"{RING}, four transfers at once"] = several[RING]
    columns = "transfers over a product s", "replayed, ms .2f", "exposed, ms .2f", "temporaries, MiB .0f"
    return compiled("forward and backward", reports, *columns, least=MIB)


LONG: dict[str, Any] = {
    "width": 2048,
    "hidden": 8192,
    "num_layers": 20,
    "num_heads": 16,
    "vocab": 4096,
    "max_seq": 131_072,
}


def long_step(platform: str = "cpu", **sizes: Any):
    """A training step of a billion parameters on one sequence of 131,072 tokens, eight devices."""
    model = transformer(**{**LONG, **sizes})

    def init():
        params = model.init(jax.random.key(0))
        params["layers"]["attention"] = split_heads(params["layers"]["attention"], LONG["num_heads"])
        return params

    params, mesh = jax.eval_shape(init), {"data": 1, "context": N}

    def local(params, batch):
        for axis in mesh:
            params = jax.tree.map(lambda leaf, axis=axis: jax.lax.pcast(leaf, axis, to="varying"), params)
        key, rate = jax.random.key(0), jnp.float32(0.01)
        after, loss = cp_transformer_step(params, batch, model, ZIGZAG, key, 0.0, "data", "context", rate)
        return {"params": jax.tree.map(lambda leaf: leaf[None], after), "loss": loss}

    tokens = (jax.ShapeDtypeStruct((1, LONG["max_seq"]), dtype) for dtype in ("int32", "int32", "float32"))
    batch = dict(zip(("inputs", "targets", "mask"), tokens, strict=True))
    specs = {"params": P(), "batch": P("data", "context")}
    out = {"params": P(("data", "context")), "loss": P()}
    return over(mesh, local, {"params": params, "batch": batch}, specs, out, platform=platform), params


@example("predicted, idealised")
def long() -> Table:
    """A billion parameters, 131,072 tokens: predicted, not run; from one layer and two, since all others are alike."""
    table = Table("layers", "parameters, million .0f", "step, s .2f", "exposed, ms .1f", "temporaries, GiB .1f")
    rows = []
    for layers in (1, 2):
        step, params = long_step(num_layers=layers)
        prediction, count = predict(step, IDEAL), sum(leaf.size for leaf in jax.tree.leaves(params))
        temporaries = prediction.memory.temporaries
        rows.append((count, prediction.timeline.seconds, prediction.timeline.exposed_seconds, temporaries))
    one, two = rows
    rows.append(tuple(a + (LONG["num_layers"] - 1) * (b - a) for a, b in zip(one, two, strict=True)))
    for layers, (count, seconds, exposed, temporaries) in zip((1, 2, LONG["num_layers"]), rows, strict=True):
        table.add(layers, count / 1e6, seconds, 1e3 * exposed, temporaries / GIB)
    return table


@kept("compiled", slow=True)
def long_compiled() -> Table:
    """The memory that the same step, with all layers, needs on a device according to the GPU compiler."""
    step, params = long_step("cuda")
    (report,) = compile_all([step], IDEAL, dict(DEFAULT_FLAGS), time_limit=1800)
    table = Table("131,072 tokens, 8 H100s", "parameters, million .0f", "temporaries, GiB .1f")
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    table.add(f"{LONG['num_layers']} layers", count / 1e6, report.memory.temporaries / GIB)
    return table

"""Sequence parallelism: what four kinds of layer send and save, the formula term by term, and Ulysses' all-to-alls."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from showing import Table, draw, draw_steps, example, holdings, kept, look, over, realistic, say, seen, sent, wrong

from autograder.chapters.sequence_parallel.alternatives import with_everything_of_the_formula
from autograder.chapters.sequence_parallel.tasks import formula
from autograder.contract.case_builders import params_by_head
from autograder.contract.task import load, trace
from course.layout import tensor_specs
from course.machines import machine
from course.model import drop, rms_norm
from course.program.compiled import compile_all
from course.render import memory_svg
from solutions.data_parallel import fold_key_over_axes
from solutions.sequence_parallel import (
    attend,
    enter_tensor_region,
    leave_tensor_region,
    selective_recompute,
    sp_block,
    ulysses_attention,
)

CONTRACT, WRONG = load("sequence_parallel"), wrong("sequence_parallel")
TASK, SELECTIVE, ULYSSES = (CONTRACT.task(name) for name in ("sp_block", "selective_recompute", "ulysses_attention"))
MACHINE, CASE = machine(TASK.machine), realistic(TASK)
S, N = CASE.sizes, 8
WHOLE = 4 * S.rows * S.seq * S.width  # bytes of whole activations
UNIT, LAYERS = WHOLE // N, S.num_layers


# --8<-- [start:layer]
def layer(params, x, key, rate, axis_name, split):
    """A layer with whatever JAX saves, in either form of tensor parallelism."""
    attention, mlp = params["attention"], params["mlp"]
    width, _, num_heads, _ = attention["qkv"]["kernel"].shape
    key = fold_key_over_axes(key, (axis_name,)) if split else key
    first, second = jax.random.split(key)

    y = enter_tensor_region(rms_norm(params["attention_norm"], x), axis_name, split)
    mixed = attend(y @ attention["qkv"]["kernel"].reshape(width, -1), num_heads)
    y = leave_tensor_region(mixed @ attention["out"]["kernel"].reshape(-1, width), axis_name, split)
    x = x + drop(y, rate, first)
    y = enter_tensor_region(rms_norm(mlp["norm"], x), axis_name, split)
    hidden = jax.nn.gelu(y @ mlp["up"]["kernel"] + mlp["up"]["bias"])
    y = leave_tensor_region(hidden @ mlp["down"]["kernel"], axis_name, split) + mlp["down"]["bias"]
    return x + drop(y, rate, second)


# --8<-- [end:layer]


@cache
def stacked(block, split: bool, number: int):
    """The analyses of a stack of these layers, forward and backward: ``block(params, x, key)``."""
    shapes = params_by_head(replace(CASE, sizes=S.replace(num_layers=number)))["layers"]
    specs, part = tensor_specs({"layers": shapes}, "tensor")["layers"], P(None, "tensor") if split else P()

    def local(params, x, upstream):
        def run(params, x):
            def step(x, numbered):
                return block(numbered[1], x, jax.random.fold_in(jax.random.key(0), numbered[0])), None

            return lax.scan(step, x, (jnp.arange(number), params))[0]

        values, back = jax.vjp(run, params, x)
        return dict(zip(("values", "params", "x"), (values, *back(upstream)), strict=True))

    x = jax.ShapeDtypeStruct((S.rows, S.seq, S.width), "float32")
    inputs, ins = {"params": shapes, "x": x, "upstream": x}, {"params": specs, "x": part, "upstream": part}
    return seen(over({"tensor": N}, local, inputs, ins, {"values": part, "params": specs, "x": part}), MACHINE)


def in_layer(params, x, key, *, split):
    return layer(params, x, key, S.dropout, "tensor", split)


def in_block(params, x, key):
    return sp_block(params, x, key, S.dropout, attend, "tensor")


def in_selective(params, x, key):
    return selective_recompute(params, x, key, S.dropout, "tensor")


KINDS = {
    "tensor parallel": (partial(in_layer, split=False), False),
    "as JAX saves it": (partial(in_layer, split=True), True),
    "sp_block": (in_block, True),
    "selective_recompute": (in_selective, True),
}


@example("predicted, idealised", "predicted, calibrated", "counted in the program")
def kinds() -> Table:
    """Transfers of a layer as multiples of (n-1)/n A, what a layer saves in units of 4 s b h / n, and the step."""
    columns = (
        "all-reduces .0f",
        "gathers .0f",
        "scatters .0f",
        "sent .0f",
        "saved .1f",
        "step, ms .1f",
        "calibrated .1f",
    )
    table = Table("twelve layers on 8 H100s", *columns)
    for name, (block, split) in KINDS.items():
        full, half = (stacked(block, split, number) for number in (LAYERS, LAYERS // 2))
        per_layer = LAYERS * WHOLE * (N - 1) / N
        # Whole leaves are all-reduced, too: a thousandth of the activations.
        counts = {kind: 0.0 for kind in ("all_reduce", "all_gather", "reduce_scatter")}
        for c in full.costs.collectives:
            counts[c.kind] += c.total_bytes / per_layer
        saved = (full.memory.temporaries - half.memory.temporaries) / (LAYERS // 2) / UNIT
        table.add(
            name,
            counts["all_reduce"] / 2,
            *(counts["all_gather"], counts["reduce_scatter"], sum(counts.values())),
            *(saved, 1e3 * full.timeline.seconds, 1e3 * full.calibrated_seconds),
        )
        draw(f"saved_{name.replace(' ', '_')}", memory_svg(full.memory, MACHINE.memory_bytes), "predicted")
    draw_steps("timeline", {"": stacked(in_selective, True, LAYERS).timeline})
    rows = list(table.rows.values())
    assert [round(row.sent) for row in rows] == [8, 8, 10, 10]
    assert rows[2].step < rows[1].step and rows[2].calibrated > rows[1].calibrated
    assert rows[0].saved > rows[1].saved > 1.5 * rows[2].saved
    plain, scores = (bytes_ / S.rows for bytes_ in formula(CASE))
    say(
        unit=f"{UNIT / 2**20:g}",
        formula=f"{(plain + scores) * S.rows / UNIT:.1f}",
        scores=f"{scores * S.rows / UNIT:g}",
    )
    say(layers=LAYERS, n=N)
    return table


# The formula's block, with one term after the other recomputed instead of saved.


def without_hidden(params, x, key, rate, axis_name, attention_again=False):
    """Like ``selective_recompute``, but recompute the whole MLP; with ``attention_again``, recompute both halves."""
    attention, mlp = params["attention"], params["mlp"]
    width, _, heads, _ = attention["qkv"]["kernel"].shape
    first, second = jax.random.split(fold_key_over_axes(key, (axis_name,)))
    core = jax.checkpoint(attend, static_argnums=1)

    @jax.checkpoint
    def into(norm, kernel, x):
        return enter_tensor_region(rms_norm(norm, x), axis_name, True) @ kernel

    def attended(x):
        mixed = core(into(params["attention_norm"], attention["qkv"]["kernel"].reshape(width, -1), x), heads)
        return leave_tensor_region(mixed @ attention["out"]["kernel"].reshape(-1, width), axis_name, True)

    @jax.checkpoint
    def fed(x):
        hidden = jax.nn.gelu(into(mlp["norm"], mlp["up"]["kernel"], x) + mlp["up"]["bias"])
        return leave_tensor_region(hidden @ mlp["down"]["kernel"], axis_name, True)

    x = x + drop((jax.checkpoint(attended) if attention_again else attended)(x), rate, first)
    return x + drop(fed(x) + mlp["down"]["bias"], rate, second)


def saves_before_gelu(params, x, key, rate, attend, axis_name):
    """The formula's block, but without saving the features after GELU; norms and the gathered product are the same."""
    attention, mlp = params["attention"], params["mlp"]
    width, _, heads, _ = attention["qkv"]["kernel"].shape
    first, second = jax.random.split(fold_key_over_axes(key, (axis_name,)))
    norm = jax.checkpoint(rms_norm)

    @jax.checkpoint
    def into(y, kernel):
        return enter_tensor_region(y, axis_name, True) @ kernel

    @jax.checkpoint
    def back(hidden, kernel):
        return leave_tensor_region(jax.nn.gelu(hidden) @ kernel, axis_name, True)

    qkv = into(norm(params["attention_norm"], x), attention["qkv"]["kernel"].reshape(width, -1))
    y = leave_tensor_region(attend(qkv, heads) @ attention["out"]["kernel"].reshape(-1, width), axis_name, True)
    x = x + drop(y, rate, first)
    hidden = into(norm(mlp["norm"], x), mlp["up"]["kernel"]) + mlp["up"]["bias"]
    return x + drop(back(hidden, mlp["down"]["kernel"]) + mlp["down"]["bias"], rate, second)


def saving_scores(block):
    """The block with attention that saves its scores, as a layer that takes no attention function."""

    def with_scores(params, x, key, rate, axis_name):
        return block(params, x, key, rate, attend, axis_name)

    return with_scores


A_SCORE = formula(CASE)[1] / UNIT
# For each block: what the previous one saves and this one does not, and how much that is by the formula.
LADDER: list[tuple[str, float, Any, Any, dict[str, Any]]] = [
    ("all of the formula", 0, SELECTIVE, saving_scores(with_everything_of_the_formula), {}),
    ("features after GELU", 4, SELECTIVE, saving_scores(saves_before_gelu), {}),
    ("inputs of two products", 2, SELECTIVE, saving_scores(sp_block), {}),
    ("scores", A_SCORE, SELECTIVE, selective_recompute, {}),
    ("two masks", 0.5, SELECTIVE, selective_recompute, {"dropout": 0.0}),
    ("features before GELU", 4, SELECTIVE, without_hidden, {"dropout": 0.0}),
    ("q, k, v, and mixed values", 4, SELECTIVE, partial(without_hidden, attention_again=True), {"dropout": 0.0}),
]
HALVES = LAYERS, LAYERS // 2


def of_terms(temporaries: list[int]) -> list[float]:
    """Each term in units of a layer, from the temporaries of the ladder's stacks of 12 and of 6 layers; inputs last."""
    pairs = zip(temporaries[::2], temporaries[1::2], strict=True)
    saved = [(more - less) / (HALVES[0] - HALVES[1]) / UNIT for more, less in pairs]
    return [*(before - after for before, after in pairwise(saved)), saved[-1]]


def ladder_rows(**columns: list[float]) -> Table:
    table = Table("saved by a layer", "formula .1f", *(f"{name} .1f" for name in columns))
    forms = [(name, form) for name, form, *_ in LADDER[1:]] + [("inputs of two norms", 2.0)]
    for (name, form), *units in zip(forms, *columns.values(), strict=True):
        table.add(name, form, *units)
    table.add("together", sum(form for _, form in forms), *map(sum, columns.values()))
    return table


@cache
def by_liveness() -> list[float]:
    stacks = [
        look(task, function, realistic(task, num_layers=number, **sizes))
        for _, _, task, function, sizes in LADDER
        for number in HALVES
    ]
    return of_terms([prediction.memory.temporaries for prediction in stacks])


@example("counted by closed form", "predicted")
def terms() -> Table:
    """The formula's terms by liveness: each is the difference of two programs."""
    table = ladder_rows(liveness=by_liveness())
    for row in table.rows.values():
        assert abs(row.liveness - row.formula) < 0.06 * row.formula + 0.5, row
    return table


@kept("counted by closed form", "predicted", "compiled", slow=True)
def with_compiler() -> Table:
    """The same terms by liveness and by XLA's compiler for GPUs."""
    programs = [
        trace(task, function, realistic(task, num_layers=number, **sizes), lambda _: None, "cuda")
        for _, _, task, function, sizes in LADDER
        for number in HALVES
    ]
    reports = compile_all(programs, MACHINE, time_limit=1800)
    table = ladder_rows(liveness=by_liveness(), compiler=of_terms([report.memory.temporaries for report in reports]))
    for row in table.rows.values():
        assert abs(row.compiler - row.liveness) < 0.2, row
    return table


@example("counted in the program")
def ulysses() -> Table:
    """Bytes that attention sends forward and backward: by all-to-alls, and by gathering keys and values."""
    table = Table(("devices", "key heads"), "all-to-all, MiB .1f", "gathered, MiB .1f", "ratio .2f")
    for devices in (2, 4, 8):
        for kv_heads in (16, 4, 1):
            case = realistic(ULYSSES, {"tensor": devices}, kv_heads=kv_heads, seq=4096, chunk=512)
            ways = ulysses_attention, WRONG["gathers_keys_and_values"]
            own, gathered = (sent(look(ULYSSES, function, case)) / 2**20 for function in ways)
            table.add((f"{devices}", f"{kv_heads} of 16"), own, gathered, own / gathered)
            if kv_heads == 16 and devices >= 4:
                assert own <= 0.5 * gathered
    return table


@example("diagram")
def numbers() -> None:
    """Figures for the page's sentences: the paper's models, and shares of the formula that stay whole."""
    for name, heads, width in (("small", 64, 6144), ("large", 96, 12288)):
        ratio = 5 * heads * 2048 / width
        say(**{f"{name}_ratio": f"{ratio:.0f}", f"{name}_share": f"{100 * ratio / (ratio + 34):.0f}"})
    say(plain8=f"{10 + 24 / 8:g}", split8=f"{34 / 8:g}", whole_share=f"{100 * 10 / 13:.0f}")
    say(alone=f"{10 + (24 + 80) / 8:g}", in_parts=f"{(34 + 80) / 8:g}", projections=f"{100 * 6 / 84:.0f}")
    mesh = {"tensor": 4}
    labels = ("token", "width")
    holdings(
        mesh, numbers_parts=((8, 8), P("tensor"), labels), numbers_heads=((8, 8), P(None, "tensor"), ("token", "head"))
    )

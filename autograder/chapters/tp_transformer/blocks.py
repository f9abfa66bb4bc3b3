"""``tp_transformer_block`` and ``parallel_transformer_block``: one layer, its features and sequences split."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder import facts, forms, limits
from autograder.cases import varying
from autograder.chapters.tp_transformer.shared import (
    OTHER,
    SIZES,
    activation_bytes,
    added_up,
    given,
    groups_of,
    heads_together,
    held_specs,
    hold,
    keys_of_parts,
    layer_of,
    model_of,
    of_model,
    others_of,
    ring_bytes,
    rows_of,
    shared_leaves,
    tensor_of,
)
from autograder.contract import Case, Evidence, Mismatch, Task, Wrapped
from autograder.draws import draw_leaves
from autograder.verdict import Fact
from autograder.wrapping import Wrapping
from course.layout import tensor_specs
from course.mesh import abstract_mesh

SEQUENTIAL, PARALLEL = "tp_transformer_block", "parallel_transformer_block"
_VALUES = "Which rows does this device hold, which heads, and which keys does it drop with?"
_GRADIENTS = "A leaf that all devices hold has a share of its gradient on each; is every part counted once?"
_TWICE = "What do attention and MLP both need, and what becomes of what both give?"
# Of a block that gathers and scatters twice, on eight H100.
FASTER = 0.85


def wrap(function: Any, case: Case) -> Wrapped:
    """Output and gradients of every device; each returns its own share of the gradients of leaves that are whole."""
    axis, rows, name = tensor_of(case), others_of(case) or None, PARALLEL if case.sizes["parallel"] else SEQUENTIAL
    specs = tensor_specs(layer_of(case), axis)
    block = P(rows, axis)
    results = {"values": block, "gradients": {"params": held_specs(layer_of(case), case), "x": block}}

    def local(params, x, key, upstream):
        key = jax.random.wrap_key_data(key[0])

        def run(params, x):
            y = function(params, x, key, case.sizes["dropout"] / 100, *given(case), axis)
            if not hasattr(y, "shape"):
                raise Mismatch(f"{name} returned {forms.describe(y)}, expected what it adds to x and x, like x")
            forms.same_shapes(name, {"y": y}, {"y": x}, case)
            return varying(y, case.mesh)

        values, back = jax.vjp(run, varying(params, case.mesh), x)
        of_params, of_x = back(upstream)
        return {"values": values, "gradients": {"params": hold(of_params), "x": of_x}}

    in_specs = {"params": specs, "x": block, "key": P(rows), "upstream": block}

    def program(**inputs):
        mesh = abstract_mesh(case.mesh)
        mapped = jax.shard_map(local, mesh=mesh, in_specs=tuple(in_specs.values()), out_specs=results)
        return mapped(*inputs.values())

    return Wrapped(program, _shapes(case), in_specs, results, {"params": "state", "key": "key"})


def _shapes(case: Case) -> dict[str, Any]:
    x = jax.ShapeDtypeStruct((rows_of(case), case.sizes["seq"], case.sizes["width"]), np.float32)
    return {
        "params": layer_of(case),
        "x": x,
        "key": jax.ShapeDtypeStruct((groups_of(case), 2), np.uint32),
        "upstream": x,
    }


def draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    shapes = _shapes(case)
    found = {
        name: draw_leaves(rng, shapes[name], 0.3 if name == "params" else 1) for name in ("params", "x", "upstream")
    }
    return {**found, "key": rng.integers(0, 2**32 - 1, (groups_of(case), 2), np.uint32)}


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """The course's layer on one device for each group, and what it keeps of the gradient of its weights."""
    run, groups = _one_group(*of_model(case)), groups_of(case)
    x, upstream = (np.split(inputs[name], groups) for name in ("x", "upstream"))
    each = [run(inputs["params"], *group) for group in zip(x, inputs["key"], upstream, strict=True)]
    values, of_params, of_x = zip(*each, strict=True)
    of_params = jax.tree.map(lambda *found: np.stack(found), *of_params)
    return {"values": np.concatenate(values), "gradients": {"params": of_params, "x": np.concatenate(of_x)}}


@lru_cache(maxsize=32)
def _one_group(sizes: tuple[tuple[str, int], ...], parts: int) -> Any:
    model = model_of(Case("", {}, dict(sizes)))

    def run(params, x, key, upstream):
        keys = keys_of_parts(jax.random.wrap_key_data(key), parts)
        values, back = jax.vjp(lambda params, x: model.layer(heads_together(params), x, keys), params, x)
        return values, *back(upstream)

    return jax.jit(run)


def _sent(e: Evidence, times: int, *, by_sum: bool) -> float:
    """Of whole activations, gathered or scattered so often; or twice the bytes by sums, which do both."""
    if bool(e.case.sizes.get("by_sum")) != by_sum:
        return 0.0
    return times * (2 if by_sum else 1) * ring_bytes(e.case, activation_bytes(e.case))


def block_facts(cases: list[Evidence], times: int) -> list[Fact]:
    """``times`` is how often a pass gathers, and how often it scatters."""
    whole = [added_up(e, shared_leaves(layer_of(e.case), "gradients/params")) for e in cases]
    return [
        facts.arrays_match("values", cases, "values", _VALUES),
        facts.arrays_match("gradients", whole, "gradients", _GRADIENTS, weight=2),
        facts.global_norm_matches(whole, "gradients"),
    ]


def sent_facts(counted: list[Evidence], times: int) -> list[Fact]:
    """Forward and backward: the transpose of a gather is a scatter, that of a sum another sum."""
    gathered = lambda e: _sent(e, 2 * times, by_sum=False)  # noqa: E731
    return [
        facts.bytes_sent("all-gather bytes", counted, "all_gather", gathered, weight=2),
        facts.bytes_sent("reduce-scatter bytes", counted, "reduce_scatter", gathered, weight=2),
        facts.bytes_sent("all-reduce bytes", counted, "all_reduce", lambda e: _sent(e, 4 * times, by_sum=True)),
        facts.only_collectives(OTHER, counted, ("all_gather", "reduce_scatter", "all_reduce")),
    ]


def sequential_facts(cases: list[Evidence], _: Evidence | None, __: dict[str, Any]) -> list[Fact]:
    return [*block_facts(cases, 2), *sent_facts(cases, 2)]


def parallel_facts(cases: list[Evidence], large: Evidence | None, references: dict[str, Any]) -> list[Fact]:
    counted = [*cases, large] if large else cases
    return [
        *block_facts(cases, 1),
        *sent_facts(counted, 1),
        limits.time_within(large, references, FASTER, _TWICE, than=limits.NAIVE, weight=3),
    ]


# The proportions of the realistic size: what is split off a product keeps its share.
_HEADS = {"width": 32, "hidden": 128, "num_heads": 16, "dropout": 0}


def _cases(parallel: int) -> tuple[Case, ...]:
    sizes = {**SIZES, "num_layers": 1, "parallel": parallel, "by_sum": 0}
    return (
        Case("tensor=4", {"tensor": 4}, sizes, quick=True),
        Case("tensor=8, 16 heads", {"tensor": 8}, {**sizes, **_HEADS}, quick=True),
        Case("data=2 x tensor=2, by sums", {"data": 2, "tensor": 2}, {**sizes, "by_sum": 1, "dropout": 0}),
        Case("data=4 x model=2", {"data": 4, "model": 2}, {**sizes, "rows": 1}),
        Case("tensor=1", {"tensor": 1}, {**sizes, "dropout": 0}),
    )


def _unseen(parallel: int) -> Any:
    def unseen(rng: np.random.Generator) -> Case:
        mesh = [{"data": 2, "tensor": 4}, {"tensor": 2}, {"tensor": 4, "data": 2}][rng.integers(3)]
        sizes = {**SIZES, "num_layers": 1, "parallel": parallel, "by_sum": 0}
        return Case("unseen", mesh, {**sizes, "rows": 3, "hidden": int(rng.choice([24, 48])), "dropout": 20})

    return unseen


_LARGE = {**_cases(1)[1].sizes, "width": 2048, "hidden": 8192, "seq": 1024, "max_seq": 1024, "rows": 8}
_SIGNATURE = "(params, x, key, rate, gather_matmul, matmul_scatter, axis_name)"

TP_TRANSFORMER_BLOCK = Task(
    wrapping=Wrapping(SEQUENTIAL, _SIGNATURE, wrap),
    kind="local",
    points=4,
    cases=_cases(0),
    unseen=_unseen(0),
    draw=draw,
    oracle=oracle,
    facts=sequential_facts,
)
PARALLEL_TRANSFORMER_BLOCK = Task(
    wrapping=Wrapping(PARALLEL, _SIGNATURE, wrap),
    kind="local",
    points=4,
    cases=_cases(1),
    unseen=_unseen(1),
    draw=draw,
    oracle=oracle,
    facts=parallel_facts,
    analysed=(Case("tensor=8, width 2048", {"tensor": 8}, _LARGE), "tensor=8, 16 heads"),
    slow="one_after_the_other",
)

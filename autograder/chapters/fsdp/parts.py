"""``shard_params`` and ``gather_params``: a tree of leaves of every kind, split and put together again."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder import facts, forms
from autograder.cases import axis_of, axis_size
from autograder.chapters.fsdp.shared import keep, kept_specs, mean_or_own, ring_bytes
from autograder.contract import Case, Evidence, Mismatch, Task, Wrapped
from autograder.draws import draw_leaves, meshes, unseen_mesh
from autograder.facts import held_bytes, split_spec
from autograder.verdict import Fact
from autograder.wrapping import Wrapping
from course.mesh import abstract_mesh, as_varying, shard_map_with_specs, varying_axes
from course.program import Leaf
from course.program.program import path_name, spec_of


def _leaf_shapes(case: Case) -> dict[str, Any]:
    u = case.sizes["unit"]
    shapes = {
        "first": {"kernel": (u, 2 * u), "bias": (u // 2,), "square": (u, u)},
        "second": {"kernel": (2 * u + 2, u), "three": (3, u, 8), "odd": (7, 9, 5)},
        "at_limit": (8, case.sizes["min_size"] // 8),
        "scale": (),
    }
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, np.float32), shapes, is_leaf=lambda s: isinstance(s, tuple))


def wrap_shard_params(function: Any, case: Case) -> Wrapped:
    axis, shapes = axis_of(case), _leaf_shapes(case)
    found: dict[str, Any] = {}

    def local(params):
        result = function(params, axis, case.sizes["min_size"])
        if not isinstance(result, tuple) or len(result) != 2:
            raise Mismatch(f"shard_params returned {forms.describe(result)}, expected a tuple (shards, specs)")
        shards, specs = result
        forms.same_tree("shards", shards, params)
        specs = forms.same_tree("specs", specs, params, is_leaf=lambda s: isinstance(s, P))
        for (path, shard), spec in zip(jax.tree.leaves_with_path(shards), jax.tree.leaves(specs), strict=True):
            _check_spec(path_name("", path), shard, spec, axis, case)
        return shards, specs

    def program(params):
        arrays, found["specs"] = shard_map_with_specs(local, abstract_mesh(case.mesh), in_specs=(P(),))(params)
        return {"values": arrays}

    return Wrapped(
        program, {"params": shapes}, {"params": P()}, lambda: {"values": found["specs"]}, {"params": "state"}
    )


def _check_spec(name: str, shard: Any, spec: Any, axis: str, case: Case) -> None:
    where = f"leaf {name} on mesh {case.mesh_text}"
    if not isinstance(spec, P):
        raise Mismatch(f"{where}: its spec is {forms.describe(spec)}, expected a PartitionSpec")
    named = {a for entry in spec_of(spec, max(len(spec), shard.ndim)) for a in entry}
    if not named <= {axis}:
        raise Mismatch(
            f"{where}: its spec {forms.show_spec(spec)} names {sorted(named - {axis})}; "
            f"the axis to split over is {axis!r}"
        )
    if len(spec) > shard.ndim:
        raise Mismatch(
            f"{where}: its spec {forms.show_spec(spec)} has {len(spec)} entries and the leaf has {shard.ndim} dims"
        )
    differs = varying_axes(shard) - named
    if differs:
        raise Mismatch(
            f"{where}: the part differs from device to device over {', '.join(sorted(differs))}, and its spec "
            f"{forms.show_spec(spec)} says that it is whole. Does the spec say which dim you split?"
        )


def shard_params_facts(cases: list[Evidence], _: Evidence | None, __: dict[str, Any]) -> list[Fact]:
    return [
        facts.arrays_match("values", cases, "values", "Put together, the parts must give back the leaf. "),
        _specs_by_rule(cases),
        facts.state_bytes(cases, _held, lambda e: _held(e, split=False)),
        facts.only_collectives("communication", cases, ()),
    ]


def _specs_by_rule(cases: list[Evidence]) -> Fact:
    found = []
    for e in cases:
        pairs = list(zip(e.inputs, e.outputs, strict=True))
        wrong = [(leaf, part) for leaf, part in pairs if part.spec != spec_of(_rule_of(leaf, e.case), len(leaf.shape))]
        message = ""
        if wrong:
            leaf, part = wrong[0]
            message = (
                f"leaf {leaf.name.partition('/')[2]} {list(leaf.shape)} on mesh {e.case.mesh_text}: measured "
                f"{forms.show_spec(part.partition_spec)}, expected {forms.show_spec(_rule_of(leaf, e.case))} "
                f"(axis_name {axis_of(e.case)!r}, min_size {e.case.sizes['min_size']})"
            )
        measured, limit = f"{len(pairs) - len(wrong)} of {len(pairs)}", f"{len(pairs)} of {len(pairs)}"
        place: dict[str, Any] = {"case": e.case.name, "line": e.line}
        found.append(Fact("split dims", not wrong, measured, limit, "leaves", **place, message=message))
    return facts.worst(found)


def _rule_of(leaf: Leaf, case: Case) -> P:
    return split_spec(leaf.shape, axis_size(case), case.sizes["min_size"], axis_of(case))


def _held(e: Evidence, split: bool = True) -> int:
    """Bytes that the rule leaves on each device, or those of the whole tree."""
    return sum(held_bytes(leaf.shape, _rule_of(leaf, e.case) if split else P(), e.case.mesh) for leaf in e.inputs)


def _gather_specs(case: Case) -> Any:
    size, low, axis = axis_size(case), case.sizes["min_size"], axis_of(case)
    return jax.tree.map(lambda s: split_spec(s.shape, size, low, axis), _leaf_shapes(case))


def wrap_gather_params(function: Any, case: Case) -> Wrapped:
    axis, shapes, specs = axis_of(case), _leaf_shapes(case), _gather_specs(case)
    stacked = jax.tree.map(lambda s: jax.ShapeDtypeStruct((axis_size(case), *s.shape), s.dtype), shapes)
    results = {"values": P(axis), "gradients": kept_specs(specs, axis)}

    def local(shards, upstream):
        def gather(shards):
            whole = forms.same_tree("the result", function(shards, specs, axis), shards)
            forms.same_shapes("gather_params", whole, shapes, case)
            return jax.tree.map(lambda leaf: as_varying(leaf, axis), whole)

        whole, transpose = jax.vjp(gather, jax.tree.map(lambda s: as_varying(s, axis), shards))
        (gradients,) = transpose(jax.tree.map(lambda g: g[0], upstream))
        return {"values": jax.tree.map(lambda leaf: leaf[None], whole), "gradients": keep(gradients, specs, axis)}

    def program(shards, upstream):
        mesh = abstract_mesh(case.mesh)
        in_specs = (specs, P(axis))
        return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=results)(shards, upstream)

    inputs = {"shards": shapes, "upstream": stacked}
    return Wrapped(program, inputs, {"shards": specs, "upstream": P(axis)}, results, {"shards": "state"})


def gather_params_oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """Whole leaves on every device; the mean over devices of what flows back, or each device's own."""
    size = axis_size(case)
    return {
        "values": jax.tree.map(lambda a: np.repeat(a[None], size, 0), inputs["shards"]),
        "gradients": mean_or_own(inputs["upstream"], _gather_specs(case)),
    }


def gather_params_facts(cases: list[Evidence], _: Evidence | None, __: dict[str, Any]) -> list[Fact]:
    return [
        facts.arrays_match("values", cases, "values"),
        facts.arrays_match("gradients", cases, "gradients", weight=3),
        facts.bytes_sent("all-gather bytes", cases, "all_gather", ring_bytes),
        facts.bytes_sent("reduce-scatter bytes", cases, "reduce_scatter", ring_bytes),
        facts.only_collectives("other collectives", cases, ("all_gather", "reduce_scatter")),
    ]


_LEAVES = {"unit": 16, "min_size": 64}


def _unseen_leaves(rng: np.random.Generator) -> Case:
    sizes = {"unit": int(rng.choice([8, 24, 32])), "min_size": int(rng.choice([32, 64, 128]))}
    return Case("unseen", unseen_mesh(rng), sizes)


SHARD_PARAMS = Task(
    wrapping=Wrapping("shard_params", "(params, axis_name, min_size)", wrap_shard_params),
    kind="local",
    points=2,
    cases=meshes(_LEAVES),
    unseen=_unseen_leaves,
    draw=lambda rng, case: {"params": draw_leaves(rng, _leaf_shapes(case))},
    oracle=lambda inputs, case: {"values": inputs["params"]},
    facts=shard_params_facts,
    naive="keeps_everything",
)

GATHER_PARAMS = Task(
    wrapping=Wrapping("gather_params", "(shards, specs, axis_name)", wrap_gather_params),
    kind="local",
    points=3,
    cases=meshes(_LEAVES),
    unseen=_unseen_leaves,
    draw=lambda rng, case: draw_leaves(rng, wrap_gather_params(None, case).inputs),
    oracle=gather_params_oracle,
    facts=gather_params_facts,
    naive="sums_padded_parts",
)

"""The contract of ``fsdp``: every device holds a part of the model."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder import facts, forms, limits
from autograder.cases import (
    axis_of,
    axis_size,
    batch_of,
    batch_shapes,
    draw_leaves,
    meshes,
    model_of,
    params_of,
    unseen_mesh,
)
from autograder.contract import Case, Contract, Evidence, Mismatch, Task, Wrapped
from autograder.verdict import Fact
from course.mesh import abstract_mesh, as_varying, shard_map_with_specs, varying_axes
from course.model import full_loss
from course.program import Leaf
from course.program.program import path_name, spec_of


def rule(shape: tuple[int, ...], size: int, min_size: int, axis: str, skip: int = 0) -> P:
    """The spec that the chapter's rule gives a leaf; the first ``skip`` dims are never split."""
    dims = [d for d in range(skip, len(shape)) if shape[d] % size == 0]
    if math.prod(shape) < min_size or not dims:
        return P()
    largest = max(dims, key=lambda d: (shape[d], -d))
    return P(*[None] * largest, axis)


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
        _state_bytes(cases),
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
    return rule(leaf.shape, axis_size(case), case.sizes["min_size"], axis_of(case))


def _state_bytes(cases: list[Evidence]) -> Fact:
    found = []
    for e in cases:
        held = sum(part.local_bytes(e.case.mesh) for part in e.outputs)
        size = {leaf.name: 4 * math.prod(leaf.shape) for leaf in e.inputs}
        form = sum(size[leaf.name] // (axis_size(e.case) if len(_rule_of(leaf, e.case)) else 1) for leaf in e.inputs)
        whole = sum(size.values())
        message = "" if held == form else (
            f"on mesh {e.case.mesh_text} each device holds {held:,} bytes and should hold {form:,}; "
            f"the whole tree has {whole:,}")  # fmt: skip
        found.append(Fact("state bytes per device", held == form, f"{held:,}", f"{form:,}", "bytes", naive=f"{whole:,}",
                          case=e.case.name, line=e.line, message=message))  # fmt: skip
    return facts.worst(found)


def _gather_specs(case: Case) -> Any:
    size, low, axis = axis_size(case), case.sizes["min_size"], axis_of(case)
    return jax.tree.map(lambda s: rule(s.shape, size, low, axis), _leaf_shapes(case))


def wrap_gather_params(function: Any, case: Case) -> Wrapped:
    axis, shapes, specs = axis_of(case), _leaf_shapes(case), _gather_specs(case)
    stacked = jax.tree.map(lambda s: jax.ShapeDtypeStruct((axis_size(case), *s.shape), s.dtype), shapes)
    results = {"values": P(axis), "gradients": _kept_specs(specs, axis)}

    def local(shards, upstream):
        def gather(shards):
            whole = forms.same_tree("the result", function(shards, specs, axis), shards)
            forms.same_shapes("gather_params", whole, shapes, case)
            return jax.tree.map(lambda leaf: as_varying(leaf, axis), whole)

        whole, transpose = jax.vjp(gather, jax.tree.map(lambda s: as_varying(s, axis), shards))
        (gradients,) = transpose(jax.tree.map(lambda g: g[0], upstream))
        return {"values": jax.tree.map(lambda leaf: leaf[None], whole), "gradients": _keep(gradients, specs, axis)}

    def program(shards, upstream):
        mesh = abstract_mesh(case.mesh)
        in_specs = (specs, P(axis))
        return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=results)(shards, upstream)

    inputs = {"shards": shapes, "upstream": stacked}
    return Wrapped(program, inputs, {"shards": specs, "upstream": P(axis)}, results, {"shards": "state"})


def _kept_specs(specs: Any, axis: str) -> Any:
    """Sharded gradients keep their spec; those of whole leaves are returned per device, stacked."""
    return jax.tree.map(lambda spec: spec if len(spec) else P(axis), specs)


def _keep(gradients: Any, specs: Any, axis: str) -> Any:
    return jax.tree.map(lambda g, spec: g if len(spec) else as_varying(g, axis)[None], gradients, specs)


def gather_params_oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """Whole leaves on every device; the mean over devices of what flows back, or each device's own."""
    size = axis_size(case)
    return {
        "values": jax.tree.map(lambda a: np.repeat(a[None], size, 0), inputs["shards"]),
        "gradients": _mean_or_own(inputs["upstream"], _gather_specs(case)),
    }


def _mean_or_own(stacked: Any, specs: Any) -> Any:
    return jax.tree.map(lambda g, spec: np.mean(g, 0, np.float64).astype(g.dtype) if len(spec) else g, stacked, specs)


def _ring_bytes(e: Evidence, prefix: str) -> float:
    """(n-1)/n of the bytes of each sharded leaf."""
    n = axis_size(e.case)
    sharded = [leaf for leaf in e.inputs if leaf.name.startswith(prefix + "/") and any(leaf.spec)]
    return sum((n - 1) / n * 4 * math.prod(leaf.shape) for leaf in sharded)


def gather_params_facts(cases: list[Evidence], _: Evidence | None, __: dict[str, Any]) -> list[Fact]:
    return [
        facts.arrays_match("values", cases, "values"),
        facts.arrays_match("gradients", cases, "gradients", weight=3),
        facts.bytes_sent("all-gather bytes", cases, "all_gather", lambda e: _ring_bytes(e, "shards")),
        facts.bytes_sent("reduce-scatter bytes", cases, "reduce_scatter", lambda e: _ring_bytes(e, "shards")),
        facts.only_collectives("other collectives", cases, ("all_gather", "reduce_scatter")),
    ]


def _params_of(case: Case) -> tuple[Any, Any]:
    """Shapes of the model's parameters, and their specs; the dim that stacks layers is never split."""
    shapes = params_of(case)
    size, low, axis = axis_size(case), case.sizes["min_size"], axis_of(case)
    specs = {
        part: jax.tree.map(lambda s, skip=int(part == "layers"): rule(s.shape, size, low, axis, skip), tree)
        for part, tree in shapes.items()
    }
    return shapes, specs


def wrap_fsdp_loss(function: Any, case: Case) -> Wrapped:
    axis, model = axis_of(case), model_of(case)
    shapes, specs = _params_of(case)
    results = {"values": P(axis), "gradients": _kept_specs(specs, axis)}

    def local(shards, batch):
        def loss_of(shards):
            loss = function(shards, specs, batch, model, axis)
            if not hasattr(loss, "shape") or loss.shape != ():
                raise Mismatch(f"fsdp_loss returned {forms.describe(loss)}, expected a scalar, this device's mean loss")
            return as_varying(loss, axis)

        loss, gradients = jax.value_and_grad(loss_of)(jax.tree.map(lambda s: as_varying(s, axis), shards))
        return {"values": loss[None], "gradients": _keep(gradients, specs, axis)}

    def program(shards, batch):
        mesh = abstract_mesh(case.mesh)
        return jax.shard_map(local, mesh=mesh, in_specs=(specs, P(axis)), out_specs=results)(shards, batch)

    inputs = {"shards": shapes, "batch": batch_shapes(case)}
    return Wrapped(program, inputs, {"shards": specs, "batch": P(axis)}, results, {"shards": "state"})


def draw_fsdp_loss(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    shapes, _ = _params_of(case)
    return {"shards": draw_leaves(rng, shapes, 0.3), "batch": batch_of(case, int(rng.integers(2**31)))}


def fsdp_loss_oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """Loss and gradient of each device's rows on one device; sharded leaves then get the mean over devices."""
    size = axis_size(case)
    rows = jax.tree.map(lambda a: a.reshape(size, -1, *a.shape[1:]), inputs["batch"])
    each = _loss_of_each_device(tuple(case.sizes.items()))
    losses, gradients = jax.tree.map(np.asarray, each(inputs["shards"], rows))
    return {"values": losses, "gradients": _mean_or_own(gradients, _params_of(case)[1])}


@lru_cache(maxsize=32)
def _loss_of_each_device(sizes: tuple[tuple[str, int], ...]) -> Any:
    model = model_of(Case("", {}, dict(sizes)))
    return jax.jit(jax.vmap(jax.value_and_grad(lambda p, b: full_loss(model, p, b)), in_axes=(None, 0)))


_TOO_MUCH = "Whose weights are whole at that moment? Which of them could be gathered later, or again?"


_TOO_SLOW = "What is computed or read more often than it must be?"
_EXPOSED = "Later you will learn to gather one layer while another computes."


def fsdp_loss_facts(cases: list[Evidence], large: Evidence | None, references: dict[str, Any]) -> list[Fact]:
    counted = [*cases, large] if large else cases
    return [
        facts.arrays_match("values", cases, "values"),
        facts.arrays_match("gradients", cases, "gradients", weight=2),
        facts.global_norm_matches(cases, "gradients"),
        limits.temporaries_within(large, references, 1.15, _TOO_MUCH, weight=4),
        limits.time_within(large, references, 1.15, _TOO_SLOW),
        limits.exposed_within(large, references, 1.15, _EXPOSED, weight=0),
        facts.bytes_sent("all-gather bytes", counted, "all_gather", lambda e: _ring_bytes(e, "shards"), times=(1, 2)),
        facts.bytes_sent("reduce-scatter bytes", counted, "reduce_scatter", lambda e: _ring_bytes(e, "shards")),
        facts.only_collectives("other collectives", counted, ("all_gather", "reduce_scatter")),
    ]


_LEAVES = {"unit": 16, "min_size": 64}
# Four rows a device: a program that takes them in halves must not meet a single row, which JAX lowers differently.
_MLP = {"width": 16, "hidden": 32, "num_layers": 3, "features": 8, "rows": 4, "min_size": 64}
_TRANSFORMER = {"width": 16, "hidden": 32, "num_layers": 2, "vocab": 32, "seq": 8, "rows": 4, "min_size": 64}
_LARGE_MLP = {"width": 4096, "hidden": 16384, "num_layers": 3, "features": 2048, "rows": 2048, "min_size": 16384}


def _unseen_leaves(rng: np.random.Generator) -> Case:
    sizes = {"unit": int(rng.choice([8, 24, 32])), "min_size": int(rng.choice([32, 64, 128]))}
    return Case("unseen", unseen_mesh(rng), sizes)


def _unseen_mlp(rng: np.random.Generator) -> Case:
    sizes = {**_MLP, "width": int(rng.choice([16, 32])), "hidden": 64, "num_layers": int(rng.choice([2, 4]))}
    return Case("unseen", unseen_mesh(rng), sizes)


READ = {
    "values": ("fsdp", "Mistakes that cost people days"),
    "gradients": ("fsdp", "The scale of a gradient"),
    "gradient norm": ("fsdp", "The scale of a gradient"),
    "split dims": ("fsdp", "Which leaves, and along which dim"),
    "state bytes per device": ("fsdp", "Which leaves, and along which dim"),
    "communication": ("fsdp", "Which leaves, and along which dim"),
    "live temporaries": ("fsdp", "Why the backward pass gathers again"),
    "predicted time": ("fsdp", "One layer at a time"),
    "exposed communication": ("lenses", "How to read a timeline"),
    "all-gather bytes": ("fsdp", "Where the 1.5 comes from"),
    "reduce-scatter bytes": ("fsdp", "Where the 1.5 comes from"),
    "other collectives": ("fsdp", "Where the 1.5 comes from"),
}

CONTRACT = Contract(
    "fsdp",
    (
        Task(
            name="shard_params",
            kind="local",
            signature="(params, axis_name, min_size)",
            points=2,
            cases=meshes(_LEAVES),
            unseen=_unseen_leaves,
            wrap=wrap_shard_params,
            draw=lambda rng, case: {"params": draw_leaves(rng, _leaf_shapes(case))},
            oracle=lambda inputs, case: {"values": inputs["params"]},
            facts=shard_params_facts,
            naive="keeps_everything",
        ),
        Task(
            name="gather_params",
            kind="local",
            signature="(shards, specs, axis_name)",
            points=3,
            cases=meshes(_LEAVES),
            unseen=_unseen_leaves,
            wrap=wrap_gather_params,
            draw=lambda rng, case: draw_leaves(rng, wrap_gather_params(None, case).inputs),
            oracle=gather_params_oracle,
            facts=gather_params_facts,
            naive="sums_padded_parts",
        ),
        Task(
            name="fsdp_loss",
            kind="local",
            signature="(shards, specs, batch, model, axis_name)",
            points=5,
            cases=meshes(_MLP, two=_TRANSFORMER),
            unseen=_unseen_mlp,
            wrap=wrap_fsdp_loss,
            draw=draw_fsdp_loss,
            oracle=fsdp_loss_oracle,
            facts=fsdp_loss_facts,
            analysed=(Case("data=8, width 4096", {"data": 8}, _LARGE_MLP), "data=8"),
            naive="keeps_gathered_weights",
            slow="computes_a_few_rows_at_a_time",
        ),
    ),
    question_points=2,
    read=READ,
)

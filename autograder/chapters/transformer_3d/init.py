"""``init_3d``: each device's part of a Transformer's parameters, over three axes at once."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder import facts, forms
from autograder.chapters.transformer_3d.shared import (
    SIZES,
    axes_of,
    in_stages,
    named,
    specs_of,
    stacked_of,
    whole_of,
)
from autograder.contract import Case, Evidence, Mismatch, Task, Wrapped
from autograder.draws import draw_leaves
from autograder.verdict import Fact
from autograder.wrapping import Wrapping
from course.mesh import abstract_mesh, shard_map_with_specs, varying_axes
from course.program.program import path_name, spec_of

NAME = "init_3d"


def wrap(function: Any, case: Case) -> Wrapped:
    """The parts, put together by the specs that come with them."""
    shapes, found = whole_of(case), {}
    how = case.sizes["num_repeats"], case.sizes["min_size"], *axes_of(case)

    def local(params):
        result = function(params, *how)
        if not isinstance(result, tuple) or len(result) != 2:
            raise Mismatch(f"{NAME} returned {forms.describe(result)}, expected a tuple (parts, specs)")
        parts = forms.same_tree("parts", result[0], params)
        specs = forms.same_tree("specs", result[1], params, is_leaf=lambda s: isinstance(s, P))
        for (path, part), spec, like in zip(
            jax.tree.leaves_with_path(parts), jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, P)),
            jax.tree.leaves(stacked_of(case)), strict=True,
        ):  # fmt: skip
            _check(path_name("", path), part, spec, like, case)
        return parts, specs

    def program(params):
        arrays, found["specs"] = shard_map_with_specs(local, abstract_mesh(case.mesh), in_specs=(P(),))(params)
        return {"values": arrays}

    return Wrapped(
        program, {"params": shapes}, {"params": P()}, lambda: {"values": found["specs"]}, {"params": "state"}
    )


def _check(name: str, part: Any, spec: Any, like: Any, case: Case) -> None:
    where = f"leaf {name} on mesh {case.mesh_text}"
    if not isinstance(spec, P):
        raise Mismatch(f"{where}: its spec is {forms.describe(spec)}, expected a PartitionSpec")
    unknown = named(spec) - set(case.mesh)
    if unknown:
        raise Mismatch(
            f"{where}: its spec {forms.show_spec(spec)} names {sorted(unknown)}, and the mesh has no such axis"
        )
    if not hasattr(part, "shape") or part.ndim != len(like.shape) or len(spec) > part.ndim:
        raise Mismatch(
            f"{where}: the part is {forms.describe(part)} with spec {forms.show_spec(spec)}, expected one of an array "
            f"{list(like.shape)}"
        )
    differs = varying_axes(part) - named(spec)
    if differs:
        raise Mismatch(
            f"{where}: the part differs from device to device over {', '.join(sorted(differs))}, and its spec "
            f"{forms.show_spec(spec)} says that it is whole there. Does the spec say which dim you split?"
        )


def draw(rng: np.random.Generator, case: Case) -> dict[str, Any]:
    return {"params": draw_leaves(rng, whole_of(case))}


def oracle(inputs: dict[str, Any], case: Case) -> dict[str, Any]:
    """Put together again, the parts are the whole parameters, in stages."""
    return {"values": in_stages(inputs["params"], case)}


def _held(e: Evidence) -> int:
    shapes, specs = jax.tree.leaves(stacked_of(e.case)), _leaves(specs_of(e.case))
    return sum(facts.held_bytes(leaf.shape, spec, e.case.mesh) for leaf, spec in zip(shapes, specs, strict=True))


def _whole(e: Evidence) -> int:
    return sum(4 * int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(stacked_of(e.case)))


def _leaves(specs: Any) -> list[P]:
    return jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, P))


def _specs_by_rule(cases: list[Evidence]) -> Fact:
    found = []
    for e in cases:
        rules = _leaves(specs_of(e.case))
        wrong = [(part, rule) for part, rule in zip(e.outputs, rules, strict=True)
                 if part.spec != spec_of(rule, len(part.shape))]  # fmt: skip
        message = ""
        if wrong:
            part, rule = wrong[0]
            message = (
                f"leaf {part.name.partition('/')[2]} {list(part.shape)} on mesh {e.case.mesh_text}: measured "
                f"{forms.show_spec(part.partition_spec)}, expected {forms.show_spec(rule)} "
                f"(min_size {e.case.sizes['min_size']})"
            )
        right, every = len(rules) - len(wrong), len(rules)
        found.append(Fact("split dims", not wrong, f"{right} of {every}", f"{every} of {every}", "leaves",
                          case=e.case.name, line=e.line, message=message))  # fmt: skip
    return facts.worst(found)


def init_facts(cases: list[Evidence], _: Evidence | None, __: dict[str, Any]) -> list[Fact]:
    return [
        facts.arrays_match("values", cases, "values", "Put together, the parts must give back each layer. "),
        _specs_by_rule(cases),
        facts.state_bytes(cases, _held, _whole),
        facts.only_collectives("communication", cases, ()),
    ]


_SMALL = {**SIZES, "num_layers": 8}


def _unseen(rng: np.random.Generator) -> Case:
    mesh = [{"data": 2, "pipe": 4, "tensor": 1}, {"replica": 4, "stage": 1, "model": 2}][rng.integers(2)]
    return Case("unseen", mesh, {**_SMALL, "num_repeats": int(rng.choice([1, 2])), "min_size": 100, "hidden": 48})


INIT_3D = Task(
    wrapping=Wrapping(NAME, "(params, num_repeats, min_size, data_axis, pipe_axis, tensor_axis)", wrap),
    kind="local",
    points=3,
    cases=(
        Case("data=2 x pipe=2 x tensor=2", {"data": 2, "pipe": 2, "tensor": 2}, _SMALL, quick=True),
        Case("replica=4 x stage=2 x model=1", {"replica": 4, "stage": 2, "model": 1}, _SMALL, quick=True),
        Case("data=1 x pipe=1 x tensor=8", {"data": 1, "pipe": 1, "tensor": 8}, _SMALL),
        Case("data=8 x pipe=1 x tensor=1", {"data": 8, "pipe": 1, "tensor": 1}, {**_SMALL, "num_repeats": 4}),
        Case("data=1 x pipe=2 x tensor=1", {"data": 1, "pipe": 2, "tensor": 1}, {**_SMALL, "num_repeats": 1}),
    ),
    unseen=_unseen,
    draw=draw,
    oracle=oracle,
    facts=init_facts,
)

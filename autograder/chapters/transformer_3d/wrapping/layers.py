"""The components of ``forward_3d`` as the tracer wraps them: weights, the layers of a stage, and of all repeats."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.chapters.transformer_3d.wrapping.model import (
    Sizes,
    axes_named,
    axes_of,
    given_specs,
    named,
    options_of,
    sizes_of,
    stacked_of,
)
from autograder.contract.case import Case
from autograder.contract.case_builders import KEY, params_by_head
from autograder.contract.output_checks import same_shapes, same_tree
from autograder.contract.wrapping import Wrapped, on_mesh
from course.layout import tensor_specs
from course.mesh import varying

_ROLES = {"key": "key", "params": "state"}


def wrap_whole(function: Any, case: Case[Sizes]) -> Wrapped:
    """Weights on every device, of layers and of the ends; each device has a different cotangent."""
    data, pipe, tensor = axes_of(case)
    specs, each, dtype = given_specs(case), P(tuple(case.mesh)), options_of(case).dtype
    shapes = whole_on_data(case)

    def local(params, upstream):
        def whole(params):
            gathered = {}
            for names, shared in ((("layers",), (tensor,)), (("embed", "head"), (pipe, tensor))):
                subtrees = ({name: tree[name] for name in names} for tree in (params, specs))
                gathered |= same_tree(
                    "weights", function(*subtrees, dtype, data, shared), {n: params[n] for n in names}
                )
            same_shapes("whole_weights", gathered, {name: shapes[name] for name in gathered}, case)
            return varying(gathered, case.mesh)

        weights, back = jax.vjp(whole, varying(params, case.mesh))
        (gradients,) = back(jax.tree.map(lambda leaf: leaf[0], upstream))
        return jax.tree.map(lambda leaf: leaf[None], {"values": weights, "gradients": gradients})

    count = int(np.prod(list(case.mesh.values())))
    upstream = jax.tree.map(lambda s: jax.ShapeDtypeStruct((count, *s.shape), s.dtype), shapes)
    inputs = {"params": (stacked_of(case), specs), "upstream": (upstream, each)}
    return on_mesh(local, case, inputs, {"values": each, "gradients": each}, {"params": "state"})


def whole_on_data(case: Case[Sizes]) -> Any:
    """Shapes of a device's weights, whole over the data axis."""
    data, *_ = axes_of(case)

    def local(leaf, spec):
        parts = [np.prod([case.mesh[axis] for axis in axes_named(spec, i) if axis != data]) for i in range(leaf.ndim)]
        return jax.ShapeDtypeStruct(tuple(n // int(k) for n, k in zip(leaf.shape, parts, strict=True)), leaf.dtype)

    return jax.tree.map(local, stacked_of(case), given_specs(case))


def stage_specs(case: Case[Sizes]) -> Any:
    """Specs of the layers in stages, split over ``pipe`` and ``tensor`` alone."""
    _, pipe, tensor = axes_of(case)
    split = tensor_specs(params_by_head(case)["layers"], tensor)
    return jax.tree.map(lambda spec: P(None, pipe, None, *spec), split)


def rows_at(case: Case[Sizes]) -> jax.ShapeDtypeStruct:
    """Activations of a microbatch for every stage of every pipeline, ``[data * stages * rows, seq, width]``."""
    s, (places, stages, _) = case.sizes, sizes_of(case)
    return jax.ShapeDtypeStruct((places * stages * s.rows, s.seq, s.width), np.float32)


def wrap_stage(function: Any, case: Case[Sizes]) -> Wrapped:
    """The layers' contribution to ``x``; shares of gradients are summed where weights are whole on ``tensor``.

    Every stage has a different microbatch. Where ``x`` is large, the contribution reveals intermediate rounding.
    """
    data, pipe, tensor = axes_of(case)
    specs, rows, each = stage_specs(case), P((data, pipe), tensor), P(tuple(case.mesh))
    layers = stacked_of(case)["layers"]

    def local(layers, x, key, upstream):
        own = jax.random.fold_in(jax.random.wrap_key_data(key), lax.axis_index(data))
        place, depth = lax.axis_index(pipe), len(jax.tree.leaves(layers)[0][0, 0])

        def computed(layers, x):
            weights = jax.tree.map(lambda leaf: leaf[0, 0], layers)
            y = function(weights, x, own, place + 1, place * depth, options_of(case), tensor)
            return varying(same_shapes("stage_3d", y, x, case), case.mesh)

        y, back = jax.vjp(computed, varying(layers, case.mesh), varying(x, case.mesh))
        of_layers, of_x = back(varying(upstream, case.mesh))
        summed = jax.tree.map(lambda g, spec: g if tensor in named(spec) else lax.psum(g, tensor), of_layers, specs)
        summed = varying(summed, case.mesh)
        return {"values": y - x, "gradients": {"layers": jax.tree.map(lambda g: g[0], summed), "x": of_x}}

    inputs = {
        "params": (layers, specs),
        "x": (rows_at(case), rows),
        "key": (KEY, P()),
        "upstream": (rows_at(case), rows),
    }
    gradients = {"layers": jax.tree.map(lambda _: each, layers), "x": rows}
    return on_mesh(local, case, inputs, {"values": rows, "gradients": gradients}, _ROLES)


def microbatches_at(case: Case[Sizes]) -> jax.ShapeDtypeStruct:
    """Activations of all microbatches, ``[num_microbatches, data * rows, seq, width]``."""
    s = case.sizes
    return jax.ShapeDtypeStruct((s.num_microbatches, sizes_of(case)[0] * s.rows, s.seq, s.width), np.float32)


def wrap_layers(function: Any, case: Case[Sizes]) -> Wrapped:
    """Outputs of the last stage, and gradients of these alone; the gradient of ``x`` on stage 0."""
    data, pipe, tensor = axes_of(case)
    specs, each, rows = given_specs(case)["layers"], P(tuple(case.mesh)), P(None, data, tensor)

    def local(layers, x, key, upstream):
        own = jax.random.fold_in(jax.random.wrap_key_data(key), lax.axis_index(data))
        stage = lax.axis_index(pipe)

        def computed(layers, x):
            y = function(layers, specs, x, own, options_of(case), data, pipe, tensor)
            return varying(same_shapes("layers_3d", y, x, case), case.mesh)

        y, back = jax.vjp(computed, varying(layers, case.mesh), varying(x, case.mesh))
        last = stage == lax.axis_size(pipe) - 1
        of_layers, of_x = back(varying(jnp.where(last, upstream, 0), case.mesh))
        gradients = {"layers": of_layers, "x": jnp.where(stage == 0, of_x, 0)}
        return jax.tree.map(lambda a: a[None], {"values": jnp.where(last, y, 0), "gradients": gradients})

    inputs = {
        "params": (stacked_of(case)["layers"], specs),
        "x": (microbatches_at(case), rows),
        "key": (KEY, P()),
        "upstream": (microbatches_at(case), rows),
    }
    return on_mesh(local, case, inputs, {"values": each, "gradients": each}, _ROLES)

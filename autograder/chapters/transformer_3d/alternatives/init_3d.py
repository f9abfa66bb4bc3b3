"""Right answers for ``init_3d`` in another style."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from course.layout import tensor_specs


def by_number_of_the_part(params, num_repeats, min_size, data_axis, pipe_axis, tensor_axis):
    """Every split dim in so many pieces, and one of them by its number."""
    specs = tensor_specs(params, tensor_axis)
    n, stages = lax.axis_size(data_axis), lax.axis_size(pipe_axis)

    def piece(leaf, dim, count, number):
        pieces = leaf.reshape(*leaf.shape[:dim], count, leaf.shape[dim] // count, *leaf.shape[dim + 1 :])
        return lax.dynamic_index_in_dim(pieces, number, dim, keepdims=False)

    def place(path, leaf, spec):
        names, first = list(spec) + [None] * (leaf.ndim - len(spec)), 0
        if path[0].key == "layers":
            per_visit = leaf.shape[0] // (num_repeats * stages)
            leaf = leaf.reshape(num_repeats, stages, per_visit, *leaf.shape[1:])
            leaf = lax.dynamic_index_in_dim(leaf, lax.axis_index(pipe_axis), 1)
            names, first = [None, pipe_axis, None, *names[1:]], 3
        for dim in range(first, leaf.ndim):
            if names[dim] == tensor_axis:
                leaf = piece(leaf, dim, lax.axis_size(tensor_axis), lax.axis_index(tensor_axis))
        local = leaf.shape[first:]
        size = 1
        for length in local:
            size *= length
        whole = [length if length % n == 0 else 0 for length in local]
        if size >= min_size and any(whole):
            dim = first + whole.index(max(whole))
            leaf = piece(leaf, dim, n, lax.axis_index(data_axis))
            names[dim] = data_axis if names[dim] is None else (names[dim], data_axis)
        while names and names[-1] is None:
            names = names[:-1]
        return leaf, P(*names)

    both = jax.tree.map_with_path(place, params, specs)
    return jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0)), both)


def by_rows_of_indices(params, num_repeats, min_size, data_axis, pipe_axis, tensor_axis):
    """Which indices a device holds of each dim, taken one dim after the other."""
    sizes = {axis: lax.axis_size(axis) for axis in (data_axis, pipe_axis, tensor_axis)}

    def mine(leaf, dim, axis):
        length = leaf.shape[dim] // sizes[axis]
        return jnp.take(leaf, lax.axis_index(axis) * length + jnp.arange(length), axis=dim)

    def placed(leaf, names, first):
        for dim, axis in enumerate(names):
            if axis is not None:
                leaf = mine(leaf, dim, axis)
        one = leaf[(0,) * first]
        fits = [dim for dim in range(one.ndim) if one.shape[dim] % sizes[data_axis] == 0]
        if one.size >= min_size and fits:
            dim = first + sorted(fits, key=lambda d: -one.shape[d])[0]
            names = [*names, *[None] * (leaf.ndim - len(names))]
            names[dim] = (tensor_axis, data_axis) if names[dim] == tensor_axis else data_axis
            leaf = mine(leaf, dim, data_axis)
        used = [dim for dim, axis in enumerate(names) if axis is not None]
        return leaf, P(*names[: used[-1] + 1] if used else ())

    found = {}
    for part, tree in params.items():
        leaves, form = jax.tree.flatten(tree)
        split = form.flatten_up_to(tensor_specs({part: tree}, tensor_axis)[part])
        if part == "layers":
            leaves = [leaf.reshape(num_repeats, sizes[pipe_axis], -1, *leaf.shape[1:]) for leaf in leaves]
            pairs = [placed(a, [None, pipe_axis, None, *spec[1:]], 3) for a, spec in zip(leaves, split, strict=True)]
        else:
            pairs = [placed(a, list(spec), 0) for a, spec in zip(leaves, split, strict=True)]
        found[part] = [form.unflatten(each) for each in zip(*pairs, strict=True)]
    return {part: tree for part, (tree, _) in found.items()}, {part: specs for part, (_, specs) in found.items()}


ALTERNATIVES = (by_number_of_the_part, by_rows_of_indices)

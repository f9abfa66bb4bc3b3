"""A right shard_params: what an attack shows where it wants to look honest."""

import jax
from jax import lax
from jax.sharding import PartitionSpec as P


def chosen_dim(shape, size, min_size):
    dims = [dim for dim, length in enumerate(shape) if length % size == 0]
    count = 1
    for length in shape:
        count *= length
    return max(dims, key=lambda dim: (shape[dim], -dim)) if dims and count >= min_size else None


def right_specs(params, axis_name, min_size, size):
    def spec_of(leaf):
        dim = chosen_dim(leaf.shape, size, min_size)
        return P() if dim is None else P(*[None] * dim, axis_name)

    return jax.tree.map(spec_of, params)


def right_shards(params, axis_name, min_size):
    size, here = lax.axis_size(axis_name), lax.axis_index(axis_name)

    def part(leaf):
        dim = chosen_dim(leaf.shape, size, min_size)
        if dim is None:
            return leaf
        length = leaf.shape[dim] // size
        start = [here * length if d == dim else 0 for d in range(leaf.ndim)]
        return lax.dynamic_slice(leaf, start, [length if d == dim else n for d, n in enumerate(leaf.shape)])

    return jax.tree.map(part, params), right_specs(params, axis_name, min_size, size)


def whole(params, axis_name, min_size):
    """Wrong: every device keeps everything, and says so."""
    return params, jax.tree.map(lambda _: P(), params)

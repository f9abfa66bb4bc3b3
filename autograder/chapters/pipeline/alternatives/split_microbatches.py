"""Right answers for ``split_microbatches`` in another style."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def by_split(batch, num_microbatches):
    """A list of equal parts, stacked again."""

    def parts(leaf):
        if leaf.shape[0] % num_microbatches != 0:
            raise ValueError(f"batch of {leaf.shape[0]} is no multiple of {num_microbatches}")
        return jnp.stack(jnp.split(leaf, num_microbatches))

    return jax.tree.map(parts, batch)


def by_slices(batch, num_microbatches):
    """``lax.map`` over the number of the microbatch."""
    leaves, tree = jax.tree.flatten(batch)
    sizes = {leaf.shape[0] for leaf in leaves}
    for size in sizes:
        if size % num_microbatches:
            raise ValueError(f"{num_microbatches} microbatches of {size} rows would not be equally large")
    (size,) = {size // num_microbatches for size in sizes}

    def part(number):
        return [lax.dynamic_slice_in_dim(leaf, number * size, size) for leaf in leaves]

    return tree.unflatten(lax.map(part, jnp.arange(num_microbatches)))


def by_indices(batch, num_microbatches):
    """Rows picked by a table of their numbers."""
    size, rest = divmod(jax.tree.leaves(batch)[0].shape[0], num_microbatches)
    if rest:
        raise ValueError(
            f"{size * num_microbatches + rest} rows, {num_microbatches} microbatches: {rest} are left over"
        )
    rows = jnp.arange(size * num_microbatches).reshape(num_microbatches, size)
    return jax.tree.map(lambda leaf: leaf[rows], batch)


ALTERNATIVES = (by_split, by_slices, by_indices)

"""Right answers for ``fold_key_over_axes`` in another style."""

from __future__ import annotations

import math
from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax


def by_one_number_a_place(key, axis_names):
    """The place on all named axes as one number, folded in once."""
    return jax.random.fold_in(key, lax.axis_index(axis_names)) if axis_names else key


def by_splitting(key, axis_names):
    """As many keys as there are places, and one's own of them."""
    keys = jax.random.split(key, math.prod(map(lax.axis_size, axis_names)))
    return keys[lax.axis_index(axis_names) if axis_names else 0]


def by_reducing_backwards(key, axis_names):
    """``functools.reduce``, the last axis first."""
    return reduce(lambda k, name: jax.random.fold_in(k, lax.axis_index(name)), reversed(axis_names), key)


def by_recursion(key, axis_names):
    """One axis, then the rest."""
    if not axis_names:
        return key
    first, *rest = axis_names
    return by_recursion(jax.random.fold_in(key, lax.axis_index(first)), rest)


def by_strides(key, axis_names):
    """The place written out with strides; a constant is folded in as well, named axes or not."""
    place, stride = jnp.int32(0), 1
    for name in axis_names:
        place, stride = place + stride * lax.axis_index(name), stride * lax.axis_size(name)
    return jax.random.fold_in(jax.random.fold_in(key, 7), place)


def by_drawing_key_data(key, axis_names):
    """New key data drawn for every place, and one's own row of them."""
    count = math.prod(lax.axis_size(name) for name in axis_names)
    data = jax.random.bits(key, (count, 2), jnp.uint32)
    place = lax.axis_index(axis_names) if axis_names else 0
    return jax.random.wrap_key_data(lax.dynamic_index_in_dim(data, place, keepdims=False))


ALTERNATIVES = (
    by_one_number_a_place,
    by_splitting,
    by_reducing_backwards,
    by_recursion,
    by_strides,
    by_drawing_key_data,
)

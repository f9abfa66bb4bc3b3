"""Slots inside a Program: buffers with a leading dim, one entry of which is read or written at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

PyTree = Any


def empty_slots(shapes: PyTree, count: int, like: jax.Array) -> PyTree:
    """Zeros with ``count`` slots for each leaf of ``shapes``, varying over the axes over which ``like`` does."""
    return jax.tree.map(lambda leaf: jnp.zeros_like(like, leaf.dtype, (count, *leaf.shape)), shapes)


def read_slot(buffers: PyTree, slot: jax.Array | int) -> PyTree:
    """The contents of a slot: each leaf ``[slots, ...]`` becomes ``[...]``."""
    return jax.tree.map(lambda buffer: lax.dynamic_index_in_dim(buffer, slot, keepdims=False), buffers)


def write_slot(buffers: PyTree, slot: jax.Array | int, new: PyTree, when: jax.Array | bool = True) -> PyTree:
    """The buffers with ``new`` in a slot, or unchanged where ``when`` is false: then nothing is moved."""

    def write(buffers: PyTree) -> PyTree:
        return jax.tree.map(lambda buffer, entry: lax.dynamic_update_index_in_dim(buffer, entry, slot, 0), buffers, new)

    return write(buffers) if when is True else lax.cond(when, write, lambda buffers: buffers, buffers)

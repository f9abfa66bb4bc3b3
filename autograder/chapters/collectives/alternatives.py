"""Alternative implementations of ``collectives``: each must pass every fact."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def hop(x, axis_name, shift=1):
    size = lax.axis_size(axis_name)
    return lax.ppermute(x, axis_name, [(i, (i + shift) % size) for i in range(size)])


def gathers_unrolled(x, axis_name):
    """A Python loop, with places indexed in a separate dim."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    whole = jnp.zeros((size, *x.shape), x.dtype).at[index].set(x)
    for step in range(1, size):
        x = hop(x, axis_name)
        whole = whole.at[(index - step) % size].set(x)
    return whole.reshape(-1, *x.shape[1:])


def gathers_both_ways(x, axis_name):
    """Half of the chunks come from each neighbour."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    whole = jnp.zeros((size, *x.shape), x.dtype).at[index].set(x)
    upwards = downwards = x
    for step in range(1, size // 2 + 1):
        upwards = hop(upwards, axis_name)
        whole = whole.at[(index - step) % size].set(upwards)
        if step < size - step:
            downwards = hop(downwards, axis_name, -1)
            whole = whole.at[(index + step) % size].set(downwards)
    return whole.reshape(-1, *x.shape[1:])


def scatters_unrolled(x, axis_name):
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    chunks = x.reshape(size, -1, *x.shape[1:])
    total = chunks[(index + 1) % size]
    for step in range(1, size):
        total = hop(total, axis_name, -1) + chunks[(index + 1 + step) % size]
    return total


def scatters_by_scan(x, axis_name):
    """A scan over the chunk indices."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    chunks = x.reshape(size, -1, *x.shape[1:])

    def body(total, number):
        return chunks[number] + hop(total, axis_name), None

    numbers = (index - 1 - jnp.arange(size)) % size
    return lax.scan(body, chunks[numbers[0]], numbers[1:])[0]


def reduces_in_place(x, axis_name):
    """Both halves in one array: sums replace chunks, then finished chunks replace sums."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    length = len(x) // size

    def read(x, number):
        return lax.dynamic_slice_in_dim(x, number % size * length, length, 0)

    def write(x, chunk, number):
        return lax.dynamic_update_slice_in_dim(x, chunk, number % size * length, 0)

    def reduce(step, x):
        arrived = hop(read(x, index - step), axis_name)
        return write(x, read(x, index - step - 1) + arrived, index - step - 1)

    def spread(step, x):
        return write(x, hop(read(x, index + 1 - step), axis_name), index - step)

    return lax.fori_loop(0, size - 1, spread, lax.fori_loop(0, size - 1, reduce, x))


def reduces_unrolled(x, axis_name):
    size = lax.axis_size(axis_name)
    index = lax.axis_index(axis_name)
    chunks = x.reshape(size, -1, *x.shape[1:])
    total = chunks[index]
    for step in range(1, size):
        total = hop(total, axis_name) + chunks[(index - step) % size]
    whole = chunks.at[(index + 1) % size].set(total)
    for step in range(size - 1):
        total = hop(total, axis_name)
        whole = whole.at[(index - step) % size].set(total)
    return whole.reshape(x.shape)


def exchanges_the_other_way_round(x, axis_name):
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    chunks = x.reshape(size, -1, *x.shape[1:])
    result = jnp.zeros_like(chunks).at[index].set(chunks[index])
    for shift in reversed(range(1, size)):
        result = result.at[(index + shift) % size].set(hop(chunks[(index - shift) % size], axis_name, -shift))
    return result.reshape(x.shape)


def exchanges_in_pairs(x, axis_name):
    """In each step pairs of devices swap: those whose indices add up to the step's number, modulo the axis size."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    length = len(x) // size
    for total in range(size):
        start = (total - index) % size * length
        mine = lax.dynamic_slice_in_dim(x, start, length, 0)
        theirs = lax.ppermute(mine, axis_name, [(i, (total - i) % size) for i in range(size)])
        x = lax.dynamic_update_slice_in_dim(x, theirs, start, 0)
    return x


def rows_with_every_dim(first, second):
    return P(first, None)


def rows_as_tuple(first, second):
    return P((first,))


def crossed_from_a_list(first, second):
    return P(*reversed([first, second]))


def crossed_as_tuples(first, second):
    return P((second,), (first,))


def slices_from_a_list(first, second):
    return P(*[None, (second, first)])


def slices_by_name(first, second):
    spec: list = [None, None]
    spec[1] = (second, first)
    return P(*spec)


def block_asked_of_jax(shape, spec, mesh):
    axes = AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))
    return NamedSharding(axes, spec).shard_shape(shape)


def block_in_a_loop(shape, spec, mesh):
    block = list(shape)
    for dim, entry in enumerate(spec):
        for axis in (entry,) if isinstance(entry, str) else entry or ():
            block[dim] //= mesh[axis]
    return block


def copies_of_unused_axes(spec, mesh):
    used = set(jax.tree.leaves([entry for entry in spec if entry is not None]))
    copies = 1
    for axis, size in mesh.items():
        copies *= 1 if axis in used else size
    return copies


def copies_by_dividing(spec, mesh):
    copies = math.prod(mesh.values())
    for entry in spec:
        for axis in [entry] if isinstance(entry, str) else entry or []:
            copies //= mesh[axis]
    return copies


def join_by_reference(first, second):
    return jax.lax.all_gather.__name__, second


def join_as_list(first, second):
    return ["all_gather", second]


def add_by_reference(first, second):
    return jax.lax.psum_scatter.__name__, second


def add_as_list(first, second):
    return ["psum_scatter", second]


def turn_by_reference(first, second):
    return jax.lax.all_to_all.__name__, first


def turn_as_list(first, second):
    return ["all_to_all", first]


ALTERNATIVES = {
    "ring_all_gather": (gathers_unrolled, gathers_both_ways),
    "ring_reduce_scatter": (scatters_unrolled, scatters_by_scan),
    "ring_all_reduce": (reduces_in_place, reduces_unrolled),
    "ring_all_to_all": (exchanges_the_other_way_round, exchanges_in_pairs),
    "puzzle_rows": (rows_with_every_dim, rows_as_tuple),
    "puzzle_crossed": (crossed_from_a_list, crossed_as_tuples),
    "puzzle_slices": (slices_from_a_list, slices_by_name),
    "puzzle_block": (block_asked_of_jax, block_in_a_loop),
    "puzzle_copies": (copies_of_unused_axes, copies_by_dividing),
    "puzzle_join": (join_by_reference, join_as_list),
    "puzzle_add": (add_by_reference, add_as_list),
    "puzzle_turn": (turn_by_reference, turn_as_list),
}

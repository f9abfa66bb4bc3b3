"""Wrong rings: each sends something, and each is a mistake that somebody has made."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autograder.proof.mutants import mutant
from solutions.collectives import ring_all_gather, ring_all_reduce, ring_all_to_all, ring_reduce_scatter


def _pairs(size: int, shift: int = 1) -> list[tuple[int, int]]:
    return [(i, (i + shift) % size) for i in range(size)]


def _hop(x: Any, axis_name: str, shift: int = 1) -> Any:
    return lax.ppermute(x, axis_name, _pairs(lax.axis_size(axis_name), shift))


def _cut(x: Any, number: Any, axis_name: str) -> Any:
    size = lax.axis_size(axis_name)
    return lax.dynamic_slice_in_dim(x, number % size * (len(x) // size), len(x) // size, 0)


def _place(whole: Any, chunk: Any, number: Any, axis_name: str) -> Any:
    number %= lax.axis_size(axis_name)
    return lax.dynamic_update_slice_in_dim(whole, chunk, number * len(chunk), 0)


def _empty(x: Any, axis_name: str) -> Any:
    shape = (lax.axis_size(axis_name) * len(x), *x.shape[1:])
    return lax.pcast(jnp.zeros(shape, x.dtype), axis_name, to="varying")


def _gather(x: Any, axis_name: str, *, hop: Any = _hop, steps: int = 0, turn: int = 1, own: bool = True) -> Any:
    """A gather by a loop in Python with something else in it; ``steps`` more than needed."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    whole = _empty(x, axis_name)
    chunk = x
    for step in range(size + steps):
        if step or own:
            whole = _place(whole, chunk, index - turn * step, axis_name)
        if step < size + steps - 1:
            chunk = hop(chunk, axis_name)
    return whole


def places_chunks_the_wrong_way_round(x, axis_name):
    return _gather(x, axis_name, turn=-1)


def stops_one_step_short(x, axis_name):
    return _gather(x, axis_name, steps=-1)


def goes_all_the_way_round(x, axis_name):
    """Takes as many steps as there are chunks: the last one brings one's own back."""
    return _gather(x, axis_name, steps=1)


def leaves_its_own_chunk_out(x, axis_name):
    return _gather(x, axis_name, own=False)


def counts_to_eight(x, axis_name):
    """Right on 8 devices alone."""
    index = lax.axis_index(axis_name)
    whole, chunk = _empty(x, axis_name), x
    for step in range(lax.axis_size(axis_name)):
        whole = lax.dynamic_update_slice_in_dim(whole, chunk, (index - step) % 8 * len(x), 0)
        if step < lax.axis_size(axis_name) - 1:
            chunk = _hop(chunk, axis_name)
    return whole


def asks_for_all_gather(x, axis_name):
    return lax.all_gather(x, axis_name, tiled=True)


def keeps_every_chunk_until_the_end(x, axis_name):
    """Collects what arrives in a list, joins it, and turns the whole to where it belongs."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    chunks = [x]
    for _ in range(size - 1):
        chunks.append(_hop(chunks[-1], axis_name))
    return jnp.roll(jnp.concatenate(chunks[::-1]), (index + 1) * len(x), 0)


def sends_in_bfloat16(x, axis_name):
    def hop(chunk, axis):
        return _hop(chunk.astype(jnp.bfloat16), axis).astype(chunk.dtype)

    return _gather(x, axis_name, hop=hop)


def stops_gradients_of_what_arrives(x, axis_name):
    return _gather(x, axis_name, hop=lambda chunk, axis: lax.stop_gradient(_hop(chunk, axis)))


def passes_the_whole_on(x, axis_name):
    """Sends everything that it has so far, in each step."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    whole = _place(_empty(x, axis_name), x, index, axis_name)
    for _ in range(size - 1):
        whole = _place(_hop(whole, axis_name), x, index, axis_name)
    return whole


def sends_all_it_has_to_a_partner(x, axis_name):
    """Few steps, the same bytes: but half of the result is on its way out while the other half comes in."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    length = len(x)
    whole = jnp.zeros((size * length, *x.shape[1:]), x.dtype)
    whole = lax.dynamic_update_slice_in_dim(whole, x, index * length, 0)
    held = 1
    while held < size:
        start = index // held * held
        other = jnp.where(start // held % 2 == 0, start + held, start - held)
        mine = lax.dynamic_slice_in_dim(whole, start * length, held * length, 0)
        pairs = [(i, i ^ held) for i in range(size)]
        whole = lax.dynamic_update_slice_in_dim(whole, lax.ppermute(mine, axis_name, pairs), other * length, 0)
        held *= 2
    return whole


def averages_what_flows_back(x, axis_name):
    @jax.custom_vjp
    def gather(x):
        return ring_all_gather(x, axis_name)

    def backward(_, gradient):
        return (ring_reduce_scatter(gradient, axis_name) / lax.axis_size(axis_name),)

    gather.defvjp(lambda x: (gather(x), None), backward)
    return gather(x)


def _scatter(x: Any, axis_name: str, *, first: int = -1, steps: int = 0, hop: Any = _hop) -> Any:
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    partial = _cut(x, index + first, axis_name)
    for step in range(1, size + steps):
        partial = hop(partial, axis_name) + _cut(x, index + first - step, axis_name)
    return partial


def starts_with_its_own_chunk(x, axis_name):
    """The finished sums then lie one device too far."""
    return _scatter(x, axis_name, first=0)


def adds_one_too_few(x, axis_name):
    return _scatter(x, axis_name, steps=-1)


def starts_from_zeros(x, axis_name):
    """Begins with an empty sum, which takes one step more."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    partial = _cut(jnp.zeros_like(x), index, axis_name)
    for step in range(size):
        partial = _hop(partial, axis_name) + _cut(x, index - 1 - step, axis_name)
    return partial


def makes_the_mean(x, axis_name):
    return ring_reduce_scatter(x, axis_name) / lax.axis_size(axis_name)


def asks_for_psum_scatter(x, axis_name):
    return lax.psum_scatter(x, axis_name, tiled=True)


def reduces_all_and_cuts(x, axis_name):
    """Right, and twice the bytes."""
    return _cut(ring_all_reduce(x, axis_name), lax.axis_index(axis_name), axis_name)


def adds_at_the_end(x, axis_name):
    """Sends every chunk straight to its owner, who keeps all of them and then adds."""
    index = lax.axis_index(axis_name)
    arrived = [_cut(x, index, axis_name)]
    for shift in range(1, lax.axis_size(axis_name)):
        arrived.append(_hop(_cut(x, index + shift, axis_name), axis_name, shift))
    return jnp.sum(jnp.stack(arrived), 0)


def adds_in_bfloat16(x, axis_name):
    def hop(partial, axis):
        return _hop(partial.astype(jnp.bfloat16), axis).astype(partial.dtype)

    return _scatter(x, axis_name, hop=hop)


def sums_without_gradients(x, axis_name):
    return _scatter(x, axis_name, hop=lambda partial, axis: lax.stop_gradient(_hop(partial, axis)))


def gathers_everything_and_adds(x, axis_name):
    """What everybody does first: bring it all here, then add."""
    return ring_all_gather(x[None], axis_name).sum(0)


def passes_whole_arrays_round(x, axis_name):
    """Adds as they come by: little memory, and every array travels whole."""
    total = moving = x
    for _ in range(lax.axis_size(axis_name) - 1):
        moving = _hop(moving, axis_name)
        total = total + moving
    return total


def asks_for_psum(x, axis_name):
    return lax.pcast(lax.psum(x, axis_name), axis_name, to="varying")


def gathers_by_all_gather(x, axis_name):
    """The half that is hard by hand, the other by JAX."""
    return lax.all_gather(ring_reduce_scatter(x, axis_name), axis_name, tiled=True)


def gathers_sums_in_the_wrong_order(x, axis_name):
    """The halves do not agree on who owns which chunk."""
    return ring_all_gather(_scatter(x, axis_name, first=0), axis_name)


def averages(x, axis_name):
    return ring_all_reduce(x, axis_name) / lax.axis_size(axis_name)


def reduces_twice(x, axis_name):
    return ring_all_reduce(ring_all_reduce(x, axis_name), axis_name)


def hands_the_gradient_through(x, axis_name):
    """Takes the sum for something that every device has once, and the gradient for already summed."""

    @jax.custom_vjp
    def reduce(x):
        return ring_all_reduce(x, axis_name)

    reduce.defvjp(lambda x: (reduce(x), None), lambda _, gradient: (gradient,))
    return reduce(x)


def keeps_every_sum_until_the_end(x, axis_name):
    return keeps_every_chunk_until_the_end(ring_reduce_scatter(x, axis_name), axis_name)


def _exchange(x: Any, axis_name: str, *, turn: int = 1, steps: int = 0, whole: Any = None, hop: Any = _hop) -> Any:
    index = lax.axis_index(axis_name)
    whole = x if whole is None else whole
    for shift in range(1, lax.axis_size(axis_name) + steps):
        arriving = hop(_cut(x, index + shift, axis_name), axis_name, shift)
        whole = _place(whole, arriving, index - turn * shift, axis_name)
    return whole


def puts_chunks_where_they_were_sent(x, axis_name):
    """Fills the hole that the leaving chunk left, instead of the place of its sender."""
    return _exchange(x, axis_name, turn=-1)


def forgets_the_last_shift(x, axis_name):
    return _exchange(x, axis_name, steps=-1)


def loses_the_chunk_for_itself(x, axis_name):
    return _exchange(x, axis_name, whole=jnp.zeros_like(x))


def asks_for_all_to_all(x, axis_name):
    return lax.all_to_all(x, axis_name, 0, 0, tiled=True)


def gathers_and_picks(x, axis_name):
    """Everybody gets everything, and takes out its own column."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    rows = ring_all_gather(x, axis_name).reshape(size, size, -1, *x.shape[1:])
    return lax.dynamic_index_in_dim(rows, index, 1, keepdims=False).reshape(x.shape)


def hands_chunks_from_neighbour_to_neighbour(x, axis_name):
    """All that is still under way goes one device further in each step, and a chunk gets out where it belongs."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    whole, moving = x, jnp.roll(x, -index * (len(x) // size), 0)[len(x) // size :]
    for shift in range(1, size):
        moving = _hop(moving, axis_name)
        length = len(x) // size
        whole = _place(whole, moving[:length], index - shift, axis_name)
        moving = moving[length:]
    return whole


def puts_in_order_at_the_end(x, axis_name):
    index = lax.axis_index(axis_name)
    arrived = [_cut(x, index, axis_name)]
    for shift in range(1, lax.axis_size(axis_name)):
        arrived.append(_hop(_cut(x, index + shift, axis_name), axis_name, shift))
    return jnp.roll(jnp.concatenate(arrived[::-1]), (index + 1) * len(arrived[0]), 0)


def exchanges_twice(x, axis_name):
    """Back where it came from."""
    return ring_all_to_all(ring_all_to_all(x, axis_name), axis_name)


def exchanges_in_bfloat16(x, axis_name):
    def hop(chunk, axis, shift):
        return _hop(chunk.astype(jnp.bfloat16), axis, shift).astype(chunk.dtype)

    return _exchange(x, axis_name, hop=hop)


def exchanges_without_gradients(x, axis_name):
    return _exchange(x, axis_name, hop=lambda chunk, axis, shift: lax.stop_gradient(_hop(chunk, axis, shift)))


VALUES, GRADIENTS = "values", "gradients"
BYTES, OTHERS, TEMPORARIES = "permute bytes", "other collectives", "live temporaries"

MUTANTS = (
    mutant("ring_all_gather", places_chunks_the_wrong_way_round, VALUES, GRADIENTS),
    mutant("ring_all_gather", stops_one_step_short, VALUES, GRADIENTS, BYTES),
    mutant("ring_all_gather", goes_all_the_way_round, BYTES),
    mutant("ring_all_gather", leaves_its_own_chunk_out, VALUES, GRADIENTS),
    mutant("ring_all_gather", counts_to_eight, VALUES, GRADIENTS, shown_by=("pipe=4 x tensor=2",)),
    mutant("ring_all_gather", asks_for_all_gather, BYTES, OTHERS),
    mutant("ring_all_gather", keeps_every_chunk_until_the_end, TEMPORARIES),
    mutant("ring_all_gather", sends_in_bfloat16, VALUES, GRADIENTS, BYTES),
    mutant("ring_all_gather", stops_gradients_of_what_arrives, GRADIENTS, BYTES),
    mutant("ring_all_gather", passes_the_whole_on, BYTES, TEMPORARIES),
    mutant("ring_all_gather", sends_all_it_has_to_a_partner, TEMPORARIES),
    mutant("ring_all_gather", averages_what_flows_back, GRADIENTS),
    mutant("ring_reduce_scatter", starts_with_its_own_chunk, VALUES, GRADIENTS),
    mutant("ring_reduce_scatter", adds_one_too_few, VALUES, GRADIENTS, BYTES),
    mutant("ring_reduce_scatter", starts_from_zeros, BYTES),
    mutant("ring_reduce_scatter", makes_the_mean, VALUES, GRADIENTS),
    mutant("ring_reduce_scatter", asks_for_psum_scatter, BYTES, OTHERS),
    mutant("ring_reduce_scatter", reduces_all_and_cuts, BYTES, TEMPORARIES),
    mutant("ring_reduce_scatter", adds_at_the_end, TEMPORARIES),
    mutant("ring_reduce_scatter", adds_in_bfloat16, VALUES, GRADIENTS, BYTES),
    mutant("ring_reduce_scatter", sums_without_gradients, GRADIENTS, BYTES),
    mutant("ring_all_reduce", gathers_everything_and_adds, BYTES, TEMPORARIES),
    mutant("ring_all_reduce", passes_whole_arrays_round, BYTES, TEMPORARIES),
    mutant("ring_all_reduce", asks_for_psum, BYTES, OTHERS),
    mutant("ring_all_reduce", gathers_by_all_gather, BYTES, OTHERS),
    mutant("ring_all_reduce", gathers_sums_in_the_wrong_order, VALUES, GRADIENTS),
    mutant("ring_all_reduce", averages, VALUES, GRADIENTS),
    mutant("ring_all_reduce", reduces_twice, VALUES, GRADIENTS, BYTES, TEMPORARIES),
    mutant("ring_all_reduce", hands_the_gradient_through, GRADIENTS, BYTES),
    mutant("ring_all_reduce", keeps_every_sum_until_the_end, TEMPORARIES),
    mutant("ring_all_to_all", puts_chunks_where_they_were_sent, VALUES, GRADIENTS),
    mutant("ring_all_to_all", forgets_the_last_shift, VALUES, GRADIENTS, BYTES),
    mutant("ring_all_to_all", loses_the_chunk_for_itself, VALUES, GRADIENTS),
    mutant("ring_all_to_all", asks_for_all_to_all, BYTES, OTHERS),
    mutant("ring_all_to_all", gathers_and_picks, BYTES, TEMPORARIES),
    mutant("ring_all_to_all", hands_chunks_from_neighbour_to_neighbour, BYTES, TEMPORARIES),
    mutant("ring_all_to_all", puts_in_order_at_the_end, TEMPORARIES),
    mutant("ring_all_to_all", exchanges_twice, VALUES, GRADIENTS, BYTES, TEMPORARIES),
    mutant("ring_all_to_all", exchanges_in_bfloat16, VALUES, GRADIENTS, BYTES),
    mutant("ring_all_to_all", exchanges_without_gradients, GRADIENTS, BYTES),
)

"""Wrong answers for ``collectives``: real mistakes, and the facts that they fail."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from autograder.chapters.collectives.alternatives import hop
from autograder.chapters.mutant import WRONG, mutant, patch
from solutions.collectives import (
    puzzle_add,
    puzzle_block,
    puzzle_copies,
    puzzle_crossed,
    puzzle_join,
    puzzle_rows,
    puzzle_slices,
    puzzle_turn,
    ring_all_gather,
    ring_all_reduce,
    ring_all_to_all,
    ring_reduce_scatter,
)


def asks_for_all_gather(x, axis_name):
    return lax.all_gather(x, axis_name, tiled=True)


def keeps_every_chunk_until_the_end(x, axis_name):
    """Collects arriving chunks in a list, concatenates them, and rotates the whole into place."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    chunks = [x]
    for _ in range(size - 1):
        chunks.append(hop(chunks[-1], axis_name))
    return jnp.roll(jnp.concatenate(chunks[::-1]), (index + 1) * len(x), 0)


def asks_for_psum_scatter(x, axis_name):
    return lax.psum_scatter(x, axis_name, tiled=True)


def _arrived(x: Any, axis_name: str) -> list[Any]:
    """The chunks for this device: each straight from its sender, its own first."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    length = len(x) // size

    def chunk(number):
        return lax.dynamic_slice_in_dim(x, number % size * length, length, 0)

    return [chunk(index), *(hop(chunk(index + shift), axis_name, shift) for shift in range(1, size))]


def adds_at_the_end(x, axis_name):
    """Every owner keeps all chunks and then adds them."""
    return jnp.sum(jnp.stack(_arrived(x, axis_name)), 0)


def keeps_every_sum_until_the_end(x, axis_name):
    return keeps_every_chunk_until_the_end(ring_reduce_scatter(x, axis_name), axis_name)


def adds_in_float32(x, axis_name):
    """Returns float32, whatever the input dtype."""
    return ring_all_reduce(x.astype(jnp.float32), axis_name)


def asks_for_all_to_all(x, axis_name):
    return lax.all_to_all(x, axis_name, 0, 0, tiled=True)


def puts_in_order_at_the_end(x, axis_name):
    arrived = _arrived(x, axis_name)
    return jnp.roll(jnp.concatenate(arrived[::-1]), (lax.axis_index(axis_name) + 1) * len(arrived[0]), 0)


# Misreadings of a picture: by puzzle, in place of the right answer.
MISREADINGS = {
    (puzzle_rows, "P(first)"): {
        "splits_over_the_other_axis": "P(second)",
        "splits_columns": "P(None, first)",
        "splits_over_both": "P((first, second))",
        "splits_both_dims": "P(first, second)",
        "says_data": 'P("data")',
    },
    (puzzle_crossed, "P(second, first)"): {
        "follows_the_order_of_the_mesh": "P(first, second)",
        "splits_rows_alone": "P(second)",
        "splits_columns_alone": "P(None, first)",
        "splits_rows_over_both": "P((second, first))",
        "says_tensor": 'P("tensor", "data")',
    },
    (puzzle_slices, "P(None, (second, first))"): {
        "turns_the_order_round": "P(None, (first, second))",
        "splits_rows": "P((second, first))",
        "splits_over_one_axis": "P(None, first)",
        "splits_both_dims_too": "P(second, first)",
        "names_an_axis_twice": "P(first, (second, first))",
    },
    (puzzle_join, '"all_gather", second'): {
        "gathers_over_the_other_axis": '"all_gather", first',
        "adds_instead_of_joining": '"psum", second',
        "scatters_instead_of_joining": '"psum_scatter", second',
        "exchanges_instead_of_joining": '"all_to_all", second',
        "uses_another_librarys_name": '"allgather", second',
    },
    (puzzle_add, '"psum_scatter", second'): {
        "keeps_the_whole_sum": '"psum", second',
        "adds_over_the_other_axis": '"psum_scatter", first',
        "joins_summands": '"all_gather", second',
        "exchanges_summands": '"all_to_all", second',
        "says_reduce_scatter": '"reduce_scatter", second',
    },
    (puzzle_turn, '"all_to_all", first'): {
        "exchanges_over_the_other_axis": '"all_to_all", second',
        "gathers_to_turn": '"all_gather", first',
        "passes_on_to_turn": '"ppermute", first',
        "scatters_to_turn": '"psum_scatter", first',
        "asks_for_an_axis_that_is_not_there": '"all_to_all", "model"',
    },
}
# These are right where the axes have the names that they assume.
SHOWN_BY = {"says_data": ("pipe=4 x data=2",), "says_tensor": ("pipe=4 x data=2",)}

gather, scatter, reduce = (partial(patch, f) for f in (ring_all_gather, ring_reduce_scatter, ring_all_reduce))
exchange, block, copies = (partial(patch, f) for f in (ring_all_to_all, puzzle_block, puzzle_copies))
SENT, OTHERS, TEMPORARIES = "permute bytes", "other collectives", "live temporaries"
BOTH_HALVES = "ring_all_gather(ring_reduce_scatter(x, axis_name), axis_name)"
HOP_OF_SUM = "lax.ppermute(partial_sum, axis_name, to_next)"
HOP_OF_CHUNK = "lax.ppermute(leaving, axis_name, pairs)"
PARTS = "math.prod(mesh[axis] for axis in names)"

MUTANTS = (
    mutant("ring_all_reduce", adds_in_float32, "values", shown_by=("data=2, float16",)),
    gather("places_chunks_the_wrong_way_round", {"(index - step)": "(index + step)"}, *WRONG),
    gather(
        "stops_one_step_short",
        {"fori_loop(0, size - 1": "fori_loop(0, size - 2", "last, size - 1": "last, size - 2"},
        *WRONG,
        SENT,
    ),
    gather(
        "goes_round_powers_of_two",
        {"(index - step) % size": "(index - step & size - 1)"},
        *WRONG,
        shown_by=("pipe=3 x tensor=2",),
    ),
    mutant("ring_all_gather", asks_for_all_gather, OTHERS, SENT),
    mutant("ring_all_gather", keeps_every_chunk_until_the_end, TEMPORARIES),
    scatter("adds_one_too_few", {"fori_loop(1, size": "fori_loop(1, size - 1"}, *WRONG, SENT),
    scatter("makes_the_mean", {"pass_on, own(index - 1))": "pass_on, own(index - 1)) / size"}, *WRONG),
    mutant("ring_reduce_scatter", asks_for_psum_scatter, OTHERS, SENT),
    mutant("ring_reduce_scatter", adds_at_the_end, TEMPORARIES),
    scatter("sums_without_gradients", {HOP_OF_SUM: f"lax.stop_gradient({HOP_OF_SUM})"}, "gradients", SENT),
    reduce(
        "gathers_everything_and_adds", {BOTH_HALVES: "ring_all_gather(x[None], axis_name).sum(0)"}, TEMPORARIES, SENT
    ),
    reduce("asks_for_psum", {BOTH_HALVES: 'lax.pcast(lax.psum(x, axis_name), axis_name, to="varying")'}, OTHERS, SENT),
    reduce("averages", {BOTH_HALVES: f"{BOTH_HALVES} / lax.axis_size(axis_name)"}, *WRONG),
    reduce("reduces_twice", {"return": f"x = {BOTH_HALVES}\n    return"}, *WRONG, TEMPORARIES, SENT),
    mutant("ring_all_reduce", keeps_every_sum_until_the_end, TEMPORARIES),
    exchange("forgets_the_last_shift", {"range(1, size)": "range(1, size - 1)"}, *WRONG, SENT),
    exchange("loses_the_chunk_for_itself", {"result = x ": "result = jnp.zeros_like(x) "}, *WRONG),
    mutant("ring_all_to_all", asks_for_all_to_all, OTHERS, SENT),
    mutant("ring_all_to_all", puts_in_order_at_the_end, TEMPORARIES),
    exchange("exchanges_without_gradients", {HOP_OF_CHUNK: f"lax.stop_gradient({HOP_OF_CHUNK})"}, "gradients", SENT),
    *(
        patch(puzzle, name, {right: wrong}, "values", shown_by=SHOWN_BY.get(name, ()))
        for (puzzle, right), misreadings in MISREADINGS.items()
        for name, wrong in misreadings.items()
    ),
    block("gives_the_whole_shape", {f"dim // {PARTS}": "dim"}, "values"),
    block("multiplies", {"dim //": "dim *"}, "values"),
    block("takes_the_first_axis_of_several", {"in names)": "in names[:1])"}, "values"),
    block("divides_by_all_devices", {PARTS: "(math.prod(mesh.values()) if names else 1)"}, "values"),
    block(
        "forgets_dims_that_the_spec_leaves_out",
        {", *[None] * (len(shape) - len(spec))": "", "strict=True": "strict=False"},
        "values",
    ),
    copies("counts_all_devices", {" if axis not in split": ""}, "values"),
    copies("counts_blocks", {"not in split": "in split"}, "values"),
    copies("counts_axes", {"math.prod(size": "sum(1"}, "values"),
    copies("adds_sizes", {"math.prod": "sum"}, "values"),
    copies("overlooks_tuples", {"not in split": "not in tuple(spec)"}, "values"),
)

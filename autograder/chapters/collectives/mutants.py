"""Wrong answers for ``collectives``: mistakes that people have made, and the facts that they fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.proof.mutants import Mutant, mutant
from solutions.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter


def _pairs(size: int, shift: int = 1) -> list[tuple[int, int]]:
    return [(i, (i + shift) % size) for i in range(size)]


def _hop(x: Any, axis_name: str, shift: int = 1) -> Any:
    return lax.ppermute(x, axis_name, _pairs(lax.axis_size(axis_name), shift))


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


def leaves_its_own_chunk_out(x, axis_name):
    return _gather(x, axis_name, own=False)


def asks_for_all_gather(x, axis_name):
    return lax.all_gather(x, axis_name, tiled=True)


def keeps_every_chunk_until_the_end(x, axis_name):
    """Collects what arrives in a list, joins it, and turns the whole to where it belongs."""
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    chunks = [x]
    for _ in range(size - 1):
        chunks.append(_hop(chunks[-1], axis_name))
    return jnp.roll(jnp.concatenate(chunks[::-1]), (index + 1) * len(x), 0)


def _cut(x: Any, number: Any, axis_name: str) -> Any:
    size = lax.axis_size(axis_name)
    return lax.dynamic_slice_in_dim(x, number % size * (len(x) // size), len(x) // size, 0)


def _scatter(x: Any, axis_name: str, *, first: int = -1, steps: int = 0, hop: Any = _hop) -> Any:
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    partial = _cut(x, index + first, axis_name)
    for step in range(1, size + steps):
        partial = hop(partial, axis_name) + _cut(x, index + first - step, axis_name)
    return partial


def adds_one_too_few(x, axis_name):
    return _scatter(x, axis_name, steps=-1)


def makes_the_mean(x, axis_name):
    return ring_reduce_scatter(x, axis_name) / lax.axis_size(axis_name)


def asks_for_psum_scatter(x, axis_name):
    return lax.psum_scatter(x, axis_name, tiled=True)


def adds_at_the_end(x, axis_name):
    """Sends every chunk straight to its owner, who keeps all of them and then adds."""
    index = lax.axis_index(axis_name)
    arrived = [_cut(x, index, axis_name)]
    for shift in range(1, lax.axis_size(axis_name)):
        arrived.append(_hop(_cut(x, index + shift, axis_name), axis_name, shift))
    return jnp.sum(jnp.stack(arrived), 0)


def sums_without_gradients(x, axis_name):
    return _scatter(x, axis_name, hop=lambda partial, axis: lax.stop_gradient(_hop(partial, axis)))


def gathers_everything_and_adds(x, axis_name):
    """What everybody does first: bring it all here, then add."""
    return ring_all_gather(x[None], axis_name).sum(0)


def asks_for_psum(x, axis_name):
    return lax.pcast(lax.psum(x, axis_name), axis_name, to="varying")


def averages(x, axis_name):
    return ring_all_reduce(x, axis_name) / lax.axis_size(axis_name)


def reduces_twice(x, axis_name):
    return ring_all_reduce(ring_all_reduce(x, axis_name), axis_name)


def keeps_every_sum_until_the_end(x, axis_name):
    return keeps_every_chunk_until_the_end(ring_reduce_scatter(x, axis_name), axis_name)


def _exchange(x: Any, axis_name: str, *, turn: int = 1, steps: int = 0, whole: Any = None, hop: Any = _hop) -> Any:
    index = lax.axis_index(axis_name)
    whole = x if whole is None else whole
    for shift in range(1, lax.axis_size(axis_name) + steps):
        arriving = hop(_cut(x, index + shift, axis_name), axis_name, shift)
        whole = _place(whole, arriving, index - turn * shift, axis_name)
    return whole


def forgets_the_last_shift(x, axis_name):
    return _exchange(x, axis_name, steps=-1)


def loses_the_chunk_for_itself(x, axis_name):
    return _exchange(x, axis_name, whole=jnp.zeros_like(x))


def asks_for_all_to_all(x, axis_name):
    return lax.all_to_all(x, axis_name, 0, 0, tiled=True)


def puts_in_order_at_the_end(x, axis_name):
    index = lax.axis_index(axis_name)
    arrived = [_cut(x, index, axis_name)]
    for shift in range(1, lax.axis_size(axis_name)):
        arrived.append(_hop(_cut(x, index + shift, axis_name), axis_name, shift))
    return jnp.roll(jnp.concatenate(arrived[::-1]), (index + 1) * len(arrived[0]), 0)


def exchanges_without_gradients(x, axis_name):
    return _exchange(x, axis_name, hop=lambda chunk, axis, shift: lax.stop_gradient(_hop(chunk, axis, shift)))


# The puzzles, from tables: each is a misreading of a picture.
Answer = Callable[[str, str], Any]
# By puzzle: what is misread, and the answer.
TABLE: dict[str, dict[str, Answer]] = {
    "rows": {
        "splits_over_the_other_axis": lambda first, second: P(second),
        "splits_columns": lambda first, second: P(None, first),
        "splits_over_both": lambda first, second: P((first, second)),
        "splits_both_dims": lambda first, second: P(first, second),
        "splits_nothing": lambda first, second: P(),
        "says_data": lambda first, second: P("data"),
    },
    "crossed": {
        "follows_the_order_of_the_mesh": lambda first, second: P(first, second),
        "splits_rows_alone": lambda first, second: P(second),
        "splits_columns_alone": lambda first, second: P(None, first),
        "splits_rows_over_both": lambda first, second: P((second, first)),
        "says_tensor": lambda first, second: P("tensor", "data"),
    },
    "slices": {
        "turns_the_order_round": lambda first, second: P(None, (first, second)),
        "splits_rows": lambda first, second: P((second, first)),
        "splits_over_one_axis": lambda first, second: P(None, first),
        "splits_both_dims_too": lambda first, second: P(second, first),
        "names_an_axis_twice": lambda first, second: P(first, (second, first)),
    },
    "join": {
        "gathers_over_the_other_axis": lambda first, second: ("all_gather", first),
        "adds_instead_of_joining": lambda first, second: ("psum", second),
        "scatters_instead_of_joining": lambda first, second: ("psum_scatter", second),
        "exchanges_instead_of_joining": lambda first, second: ("all_to_all", second),
        "passes_on_instead_of_joining": lambda first, second: ("ppermute", second),
        "uses_another_librarys_name": lambda first, second: ("allgather", second),
    },
    "add": {
        "keeps_the_whole_sum": lambda first, second: ("psum", second),
        "adds_over_the_other_axis": lambda first, second: ("psum_scatter", first),
        "joins_summands": lambda first, second: ("all_gather", second),
        "exchanges_summands": lambda first, second: ("all_to_all", second),
        "says_reduce_scatter": lambda first, second: ("reduce_scatter", second),
        "makes_a_mean": lambda first, second: ("pmean", second),
    },
    "turn": {
        "exchanges_over_the_other_axis": lambda first, second: ("all_to_all", second),
        "gathers_to_turn": lambda first, second: ("all_gather", first),
        "passes_on_to_turn": lambda first, second: ("ppermute", first),
        "scatters_to_turn": lambda first, second: ("psum_scatter", first),
        "asks_for_an_axis_that_is_not_there": lambda first, second: ("all_to_all", "model"),
    },
}


def _named(name: str, answer: Answer) -> Callable[..., Any]:
    def wrong(first, second):
        return answer(first, second)

    wrong.__name__ = name
    return wrong


def _entries(shape: Any, spec: Any) -> list[Any]:
    return [*spec, *[None] * (len(shape) - len(spec))]


def _axes(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def gives_the_whole_shape(shape, spec, mesh):
    return shape


def multiplies(shape, spec, mesh):
    """The shape of the whole, were the shape that of a block."""
    cuts = [math.prod(mesh[a] for a in _axes(entry)) for entry in _entries(shape, spec)]
    return tuple(dim * cut for dim, cut in zip(shape, cuts, strict=True))


def forgets_dims_that_the_spec_leaves_out(shape, spec, mesh):
    return tuple(dim // math.prod(mesh[a] for a in _axes(entry)) for dim, entry in zip(shape, spec, strict=False))


def takes_the_first_axis_of_several(shape, spec, mesh):
    cuts = [math.prod(mesh[a] for a in _axes(entry)[:1]) for entry in _entries(shape, spec)]
    return tuple(dim // cut for dim, cut in zip(shape, cuts, strict=True))


def divides_by_all_devices(shape, spec, mesh):
    return tuple(
        dim // math.prod(mesh.values()) if entry else dim
        for dim, entry in zip(shape, _entries(shape, spec), strict=True)
    )


def splits_dims_in_the_order_of_the_mesh(shape, spec, mesh):
    """Reads the mesh as if it were the spec."""
    sizes = [*mesh.values(), *[1] * len(shape)]
    return tuple(dim // size if dim % size == 0 else dim for dim, size in zip(shape, sizes, strict=False))


def counts_all_devices(spec, mesh):
    return math.prod(mesh.values())


def counts_blocks(spec, mesh):
    """How many different blocks there are, not how often each is held."""
    return math.prod(mesh[a] for entry in spec for a in _axes(entry))


def counts_axes(spec, mesh):
    return len(set(mesh) - {a for entry in spec for a in _axes(entry)})


def says_once(spec, mesh):
    return 1


def adds_sizes(spec, mesh):
    return sum(size for axis, size in mesh.items() if axis not in {a for entry in spec for a in _axes(entry)}) or 1


def overlooks_tuples(spec, mesh):
    """Takes an axis that stands in a tuple for unused."""
    return math.prod(size for axis, size in mesh.items() if axis not in tuple(spec))


NUMBERS = {
    "block": (gives_the_whole_shape, multiplies, forgets_dims_that_the_spec_leaves_out,
              takes_the_first_axis_of_several, divides_by_all_devices, splits_dims_in_the_order_of_the_mesh),
    "copies": (counts_all_devices, counts_blocks, counts_axes, says_once, adds_sizes, overlooks_tuples),
}  # fmt: skip

# These are right where the axes have the names, or the order, that they take for granted.
_SHOWN_BY = {"says_data": ("pipe=4 x data=2",), "says_tensor": ("pipe=4 x data=2",)}


def _all() -> list[Mutant]:
    found = [
        mutant(f"puzzle_{puzzle}", _named(name, answer), "values", shown_by=_SHOWN_BY.get(name, ()))
        for puzzle, answers in TABLE.items()
        for name, answer in answers.items()
    ]
    return found + [mutant(f"puzzle_{puzzle}", f, "values") for puzzle, wrong in NUMBERS.items() for f in wrong]


MUTANTS = (
    mutant("ring_all_gather", places_chunks_the_wrong_way_round, "gradients", "values"),
    mutant("ring_all_gather", stops_one_step_short, "gradients", "permute bytes", "values"),
    mutant("ring_all_gather", leaves_its_own_chunk_out, "gradients", "values"),
    mutant("ring_all_gather", asks_for_all_gather, "other collectives", "permute bytes"),
    mutant("ring_all_gather", keeps_every_chunk_until_the_end, "live temporaries"),
    mutant("ring_reduce_scatter", adds_one_too_few, "gradients", "permute bytes", "values"),
    mutant("ring_reduce_scatter", makes_the_mean, "gradients", "values"),
    mutant("ring_reduce_scatter", asks_for_psum_scatter, "other collectives", "permute bytes"),
    mutant("ring_reduce_scatter", adds_at_the_end, "live temporaries"),
    mutant("ring_reduce_scatter", sums_without_gradients, "gradients", "permute bytes"),
    mutant("ring_all_reduce", gathers_everything_and_adds, "live temporaries", "permute bytes"),
    mutant("ring_all_reduce", asks_for_psum, "other collectives", "permute bytes"),
    mutant("ring_all_reduce", averages, "gradients", "values"),
    mutant("ring_all_reduce", reduces_twice, "gradients", "live temporaries", "permute bytes", "values"),
    mutant("ring_all_reduce", keeps_every_sum_until_the_end, "live temporaries"),
    mutant("ring_all_to_all", forgets_the_last_shift, "gradients", "permute bytes", "values"),
    mutant("ring_all_to_all", loses_the_chunk_for_itself, "gradients", "values"),
    mutant("ring_all_to_all", asks_for_all_to_all, "other collectives", "permute bytes"),
    mutant("ring_all_to_all", puts_in_order_at_the_end, "live temporaries"),
    mutant("ring_all_to_all", exchanges_without_gradients, "gradients", "permute bytes"),
    *_all(),
)

"""Wrong answers to the puzzles, from tables: each is a misreading of a picture."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jax.sharding import PartitionSpec as P

from autograder.proof.mutants import Mutant, mutant

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


MUTANTS = tuple(_all())

"""Arrays concatenated from others, as in a bucket of gradients, and slices that extract whole pieces again.

The gradient of a kernel grows faster with a model than that of a bias, so a slice that takes the bias out of a bucket
keeps a smaller part of it at a large size. It still does the same at both sizes if it begins and ends at the same
piece boundaries. These are tracked through everything that keeps each element in its place: arithmetic, reshapes of
other dims, collectives, loops. No slice can exploit this: results are right at the small size only if they use every
piece that matters, and at the large size the same pieces make up the whole array, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from course.program.ir import ELEMENTWISE, Block, Op, Value, makers_of, walk

Pair = tuple[int, int]  # at the small and at the large size
_IN_PLACE = {"all_reduce", "collective_permute", "all_gather", "reduce_scatter", "reduce", "slice", "dynamic_slice"}
_OF_ONE_NUMBER = {"broadcast_in_dim", "reshape", "transpose", "slice", "all_reduce", "all_gather", "reduce_scatter"}


class Pieces(NamedTuple):
    """A concatenated dim: its number, and the end of each piece. All elements are one number if ``dim`` is -1."""

    dim: int
    ends: tuple[Pair, ...]


_UNIFORM = Pieces(-1, ())


@dataclass
class Joined:
    """The current knowledge about the larger of two programs that are supposed to do the same.

    Attributes:
        pieces: Pieces by value.
        numbers: Constants of one element, of both programs.
        turned: Slices that are only joined again into the whole that they were taken from.
        taken: Maps the location of a slice of whole pieces (dim, start, end and the dim's size) to the sliced value.
    """

    pieces: dict[Value, Pieces] = field(default_factory=dict)
    taken: dict[tuple[int, Pair, Pair, Pair], Pieces] = field(default_factory=dict)
    numbers: dict[Value, Any] = field(default_factory=dict)
    turned: set[Value] = field(default_factory=set)

    def follow(self, small: Block, large: Block) -> Joined:
        """Go through a block of both programs."""
        for ours, theirs in zip(self._steps(small), self._steps(large), strict=False):
            if ours.kind != theirs.kind or len(ours.operands) != len(theirs.operands):
                break
            if theirs.kind == "while":
                self._follow_loop(ours, theirs)
            elif theirs.kind == "case":
                for pair in zip(ours.regions, theirs.regions, strict=False):
                    self.follow(*pair)
            else:
                self.pieces |= self._result_pieces(ours, theirs)
        return self

    def _steps(self, block: Block) -> Iterator[Op]:
        """The operations except constants, which are recorded."""
        for op in block.ops:
            if op.kind != "constant":
                yield op
            elif op.results[0].elements == 1 or op.attributes.get("zero"):
                self.pieces[op.results[0]] = _UNIFORM
                self.numbers[op.results[0]] = op.attributes.get("value")

    def _result_pieces(self, ours: Op, theirs: Op) -> dict[Value, Pieces]:
        """The pieces of an operation's results, as far as known."""
        if not theirs.operands:
            return {}
        operand_pieces = [self.pieces.get(operand) for operand in theirs.operands]
        if theirs.kind in ELEMENTWISE:  # like every operand that has pieces
            distinct = set(operand_pieces) - {_UNIFORM} or {_UNIFORM}
            return {theirs.results[0]: pieces} if len(distinct) == 1 and (pieces := distinct.pop()) else {}
        if theirs.kind == "broadcast_in_dim" and ours.operands[0].elements == theirs.operands[0].elements == 1:
            return {theirs.results[0]: _UNIFORM}  # such as the count that a bucket of sums is divided by
        if theirs.kind == "concatenate":
            dim = theirs.attributes["dimension"]
            sizes = [(a.shape[dim], b.shape[dim]) for a, b in zip(ours.operands, theirs.operands, strict=True)]
            return {theirs.results[0]: Pieces(dim, tuple(accumulate(sizes, _add)))}
        if theirs.kind == "pad":
            return self._padded(ours, theirs)
        pairs = zip(operand_pieces, theirs.operands, theirs.results, strict=False)
        moved = {result: self._moved(ours, theirs, operand, result, p) for p, operand, result in pairs if p}
        return {result: pieces for result, pieces in moved.items() if pieces}

    def _moved(self, ours: Op, theirs: Op, operand: Value, result: Value, pieces: Pieces) -> Pieces | None:
        """The pieces of a result whose operand has pieces."""
        kind, dim = theirs.kind, pieces.dim
        if kind == "optimization_barrier":
            return pieces
        if pieces is _UNIFORM:
            return pieces if kind in _OF_ONE_NUMBER else None
        if kind == "broadcast_in_dim":
            dim = theirs.attributes["broadcast_dimensions"][dim]
        elif kind == "transpose":
            dim = theirs.attributes["permutation"].index(dim)
        elif kind == "reshape":
            before = math.prod(operand.shape[:dim])
            places = [i for i in range(len(result.shape)) if math.prod(result.shape[:i]) == before]
            dim = next((i for i in places if result.shape[i] == operand.shape[dim]), -1)
        elif kind not in _IN_PLACE or (kind == "reduce" and dim in theirs.attributes["dimensions"]):
            return None
        elif kind == "reduce":
            dim -= sum(other < dim for other in theirs.attributes["dimensions"])
        elif kind in ("slice", "dynamic_slice") and result.shape[dim] != operand.shape[dim]:
            return self._cut(ours, theirs, pieces)
        same = dim >= 0 and result.shape[dim] == operand.shape[pieces.dim]
        # A fraction of every piece, until they are gathered.
        return Pieces(dim, pieces.ends) if same or kind in ("all_gather", "reduce_scatter") else None

    def _cut(self, ours: Op, theirs: Op, pieces: Pieces) -> Pieces | None:
        if not self.takes_whole(ours, theirs, pieces):
            return None
        start, end, whole = self._span(ours, theirs, pieces.dim)
        self.taken[pieces.dim, start, end, whole] = pieces
        inside = pieces.ends[1 + pieces.ends.index(start) if start in pieces.ends else 0 : pieces.ends.index(end) + 1]
        return Pieces(pieces.dim, tuple((before - start[0], now - start[1]) for before, now in inside))

    def takes_whole(self, ours: Op, theirs: Op, pieces: Pieces) -> bool:
        """Check that a slice begins and ends at piece boundaries, the same ones at both sizes."""
        start, end, whole = self._span(ours, theirs, pieces.dim)
        ends = {(0, 0), *pieces.ends}
        return whole == pieces.ends[-1] and start in ends and end in ends

    def _span(self, ours: Op, theirs: Op, dim: int) -> tuple[Pair, Pair, Pair]:
        """Start and end of a slice along a dim, and the dim's size; an unknown start is -1."""
        starts = []
        for op in (ours, theirs):
            fixed = (
                op.attributes["start_indices"][dim] if op.kind == "slice" else self.numbers.get(op.operands[1 + dim])
            )
            starts.append(-1 if fixed is None else int(fixed))
        start = starts[0], starts[1]
        return start, _add(start, _sizes(ours.results[0], theirs.results[0], dim)), _sizes(*_first(ours, theirs), dim)

    def _padded(self, ours: Op, theirs: Op) -> dict[Value, Pieces]:
        """A piece padded back into its original position, or an array padded at its end."""
        result, original = theirs.results[0], self.put_back(ours, theirs)
        if original:
            return {result: original}
        pieces = self.pieces.get(theirs.operands[0])
        if pieces is None or pieces is _UNIFORM or any(any(op.attributes["edge_padding_low"]) for op in (ours, theirs)):
            return {}
        end = ours.results[0].shape[pieces.dim], result.shape[pieces.dim]
        return {result: Pieces(pieces.dim, (*pieces.ends, end))}

    def put_back(self, ours: Op, theirs: Op) -> Pieces | None:
        """The pieces of the array that ``pad``'s operand was sliced from, if put back, as in a slice's gradient."""
        lows = [op.attributes["edge_padding_low"] for op in (ours, theirs)]
        shapes = zip(*(op.operands[0].shape for op in (ours, theirs)), strict=True)
        wholes = zip(*(op.results[0].shape for op in (ours, theirs)), strict=True)
        padded = [
            self.taken.get((dim, start, _add(start, size), whole))
            for dim, (start, size, whole) in enumerate(zip(zip(*lows, strict=True), shapes, wholes, strict=True))
            if size != whole
        ]
        return padded[0] if len(padded) == 1 else None

    def _follow_loop(self, ours: Op, theirs: Op) -> None:
        """A carried value keeps its initial pieces if each trip returns it with the same ones."""
        carried = {i: self.pieces[value] for i, value in enumerate(theirs.operands) if value in self.pieces}
        while True:
            inside = Joined(dict(self.pieces), self.taken, self.numbers)
            for region in theirs.regions:
                inside.pieces |= {region.arguments[i]: pieces for i, pieces in carried.items()}
            for pair in zip(ours.regions, theirs.regions, strict=False):
                inside.follow(*pair)
            after = {i: inside.pieces.get(theirs.regions[1].returns[i]) for i in carried}
            still_carried = {
                i: now if before is _UNIFORM else before for i, before in carried.items() if (now := after[i])
            }
            still_carried = {i: pieces for i, pieces in still_carried.items() if after[i] in (pieces, _UNIFORM)}
            if still_carried == carried:
                break
            carried = still_carried
        self.pieces = inside.pieces | {theirs.results[i]: pieces for i, pieces in carried.items()}


def turned(main: Block) -> set[Value]:
    """Slices that are only joined again into the whole that they were taken from, as in ``jnp.roll``."""
    makers = makers_of(main)
    reads = Counter(value for op in walk(main) for value in op.operands)
    rejoined: set[Value] = set()
    for op in walk(main):
        cut = [makers.get(operand) for operand in op.operands] if op.kind == "concatenate" else []
        slices = [part for part in cut if part and part.kind == "slice" and reads[part.results[0]] == 1]
        if not cut or len(slices) != len(cut) or {part.operands[0] for part in slices} != {slices[0].operands[0]}:
            continue
        dim = op.attributes["dimension"]
        bounds = sorted(
            (part.attributes["start_indices"][dim], part.attributes["limit_indices"][dim]) for part in slices
        )
        ends = [0, *(end for _, end in bounds)]
        if op.results[0].shape == slices[0].operands[0].shape and [start for start, _ in bounds] == ends[:-1]:
            rejoined.update(part.results[0] for part in slices)
    return rejoined


def _first(ours: Op, theirs: Op) -> tuple[Value, Value]:
    return ours.operands[0], theirs.operands[0]


def _sizes(ours: Value, theirs: Value, dim: int) -> Pair:
    return ours.shape[dim], theirs.shape[dim]


def _add(one: Pair, other: Pair) -> Pair:
    return one[0] + other[0], one[1] + other[1]

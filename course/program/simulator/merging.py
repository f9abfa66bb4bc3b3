"""Kernels that compilers merge into one, which reads once what each of them would read.

The complete rules:

- A *row kernel*: a reduction over the last dim, and the elementwise kernel that is the only reader of its result, if
  both compute with the same values of a row and a row has at most ``ROW`` elements. A norm is one, and so is a softmax,
  whose sum needs its maximum in the same way. It has one result and is merged with nothing else.
- Elementwise kernels and reductions over the same dims that read the same value, element by element, become one kernel
  with several results; so do a kernel and one that reads its result, element by element. No reader of the first
  result may come between them, unless nothing between them produces an operand of the second one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from course.program.fusion import captured
from course.program.ir import Block, Op, Value

ROW = 16_384  # XLA:GPU compiles a softmax over 16,384 float32 numbers to one kernel, but not one over 32,768


@dataclass(eq=False, slots=True)
class Kernel:
    """A kernel that may be merged, or the result of merging.

    Attributes:
        op: The op that writes its first result.
        written: The ops whose results it writes.
        inner: The ops whose results it computes but does not write, in addition to fused ones.
        needs: Values that must be ready before it starts.
        reads: Bytes that it reads of each value, views replaced by their origins.
        aligned: The values in ``reads`` that it reads element by element.
        passes: Values that it computes with element by element, both in memory and fused.
        elements: Number of elements: of the result, or of the reduced array.
        reduces: Shape and dims of a reduction; None for elementwise work.
        single: True for a row kernel.
    """

    op: Op
    written: list[Op]
    needs: dict[Value, None]
    reads: dict[Value, float]
    aligned: set[Value]
    passes: set[Value]
    elements: int
    reduces: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    inner: list[Op] = field(default_factory=list)
    single: bool = False

    @property
    def ops(self) -> list[Op]:
        return [*self.written, *self.inner]

    @property
    def results(self) -> list[Value]:
        return [result for op in self.written for result in op.results]

    @property
    def bytes_moved(self) -> float:
        return sum(self.reads.values()) + sum(result.bytes for result in self.results)


# Any other step of the block: the values it needs, including those of loops and branches inside, and its results.
Other = tuple[tuple[Value, ...], tuple[Value, ...]]


def merge(
    block: Block, steps: list[Kernel | Other], ancestors: Callable[[Op], list[Value]], origin: Callable[[Value], Value]
) -> list[tuple[int, Kernel | None]]:
    """Merge the kernels of a block.

    Args:
        block: The block.
        steps: In program order.
        ancestors: Returns a reduction's operand and the values that it is computed from by arithmetic alone.
        origin: Returns the value whose bytes a view shares.

    Returns:
        In order, the number of each remaining step, with the kernel that replaces it.
    """
    return _Merger(block, steps, ancestors, origin).run()


class _Merger:
    def __init__(
        self,
        block: Block,
        steps: list[Kernel | Other],
        ancestors: Callable[[Op], list[Value]],
        origin: Callable[[Value], Value],
    ):
        self.steps: list[Kernel | Other | None] = list(steps)
        self.ancestors, self.origin = ancestors, origin
        self.escaping = set(block.returns).union(*(captured(region) for op in block.ops for region in op.regions))
        self.producers: dict[Value, int] = {}
        self.readers: dict[Value, set[int]] = {}
        for number, step in enumerate(steps):
            self._note(number, step)

    def run(self) -> list[tuple[int, Kernel | None]]:
        for number, step in enumerate(self.steps):
            if isinstance(step, Kernel) and step.reduces is None:
                self._row(number, step)
        for number in range(len(self.steps)):
            while (pair := self._partner(number)) is not None:
                number = self._join(*pair)
        return [(n, s if isinstance(s, Kernel) else None) for n, s in enumerate(self.steps) if s is not None]

    def _note(self, number: int, step: Kernel | Other) -> None:
        needs, gives = (step.needs, step.results) if isinstance(step, Kernel) else step
        for value in gives:
            self.producers[value] = number
        for value in needs:
            self.readers.setdefault(value, set()).add(number)

    def _drop(self, number: int) -> None:
        step = self.steps[number]
        assert isinstance(step, Kernel)
        for value in step.needs:
            self.readers[value].discard(number)
        self.steps[number] = None

    # Row kernels

    def _row(self, number: int, kernel: Kernel) -> None:
        while True:
            reduction_places = [
                place for value in kernel.needs if (place := self._reduction(value, number)) is not None
            ]
            if len(reduction_places) != 1:
                return
            reduction = self.steps[reduction_places[0]]
            assert isinstance(reduction, Kernel)
            same = any(self.origin(value) in kernel.passes for value in self.ancestors(reduction.op))
            if reduction.elements != kernel.elements or not same:
                return
            self._drop(reduction_places[0])
            for value in reduction.results:  # of an argmax, the kernel may read the index alone
                kernel.needs.pop(value, None)
                kernel.reads.pop(self.origin(value), None)
            _absorb(kernel, reduction)
            kernel.inner += reduction.ops
            kernel.single = True
            self._note(number, kernel)

    def _reduction(self, value: Value, number: int) -> int | None:
        """The index of the reduction over a row that gives ``value``; the kernel ``number`` alone reads its results."""
        place = self.producers.get(value)
        step = self.steps[place] if place is not None else None
        if not isinstance(step, Kernel) or step.reduces is None or len(step.ops) > 1:
            return None
        shape, dims = step.reduces
        over_row = dims == (len(shape) - 1,) and shape[-1] <= ROW
        alone = all(self.readers.get(v, set()) <= {number} and v not in self.escaping for v in step.results)
        return place if over_row and alone else None

    # Kernels with several results

    def _partner(self, number: int) -> tuple[int, int] | None:
        """The indices of the earlier kernel that saves the most when merged with this one, and of this one."""
        kernel = self.steps[number]
        if not isinstance(kernel, Kernel) or kernel.single:
            return None
        candidates = {self.producers[value] for value in kernel.needs if value in self.producers}
        candidates |= {place for value in kernel.needs for place in self.readers[value]}
        saved_bytes = {}
        for place in candidates - {number}:
            other = self.steps[place]
            if isinstance(other, Kernel) and place < number and self._fits(place, other, number, kernel):
                saved_bytes[place] = _saved(other, kernel, self.origin)
        best = max(saved_bytes, key=lambda place: (saved_bytes[place], place), default=None)
        return (best, number) if best is not None and saved_bytes[best] > 0 else None

    def _fits(self, place: int, first: Kernel, number: int, second: Kernel) -> bool:
        if first.single or first.elements != second.elements:
            return False
        if first.reduces is not None and second.reduces not in (None, first.reduces):
            return False
        own = {self.origin(value) for value in first.results}
        if any(self.origin(value) in own and self.origin(value) not in second.aligned for value in second.needs):
            return False
        return self._may_rise(place, first, second) or self._may_sink(first, number)

    def _may_rise(self, place: int, first: Kernel, second: Kernel) -> bool:
        return all(self.producers.get(value, -1) < place for value in second.needs if value not in first.results)

    def _may_sink(self, first: Kernel, number: int) -> bool:
        return all(reader >= number for value in first.results for reader in self.readers.get(value, ()))

    def _join(self, place: int, number: int) -> int:
        """Merge the kernel at ``place`` with a later one; return the index of the result."""
        first, second = self.steps[place], self.steps[number]
        assert isinstance(first, Kernel) and isinstance(second, Kernel)
        target = place if self._may_rise(place, first, second) else number
        self._drop(place)
        self._drop(number)
        for value in first.results:
            if value in second.needs:
                del second.needs[value]
            second.reads.pop(self.origin(value), None)
            second.aligned.discard(self.origin(value))
        _absorb(first, second)
        first.reduces = first.reduces or second.reduces
        first.written += second.written
        first.inner += second.inner
        self.steps[target] = first
        self._note(target, first)
        return target


def _absorb(kernel: Kernel, other: Kernel) -> None:
    """Add the reads and computations of ``other``."""
    kernel.needs |= other.needs
    for value, size in other.reads.items():
        kernel.reads[value] = max(size, kernel.reads.get(value, 0.0))
    kernel.aligned |= other.aligned
    kernel.passes |= other.passes


def _saved(first: Kernel, second: Kernel, origin: Callable[[Value], Value]) -> float:
    """Bytes that both read element by element, or that one writes and the other reads."""
    shared = sum(min(first.reads[value], second.reads[value]) for value in first.aligned & second.aligned)
    return shared + sum(second.reads.get(origin(value), 0.0) for value in first.results)

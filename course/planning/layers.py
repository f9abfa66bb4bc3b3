"""How long one device takes for a layer, the loss and the embedding of one microbatch: kernels by the roofline, rings.

The kernels are those that the timeline makes of ``course.model.TransformerLayer`` and of the loss with a split
vocabulary: their arrays are counted below, in numbers of elements read or written. On ``t`` devices of the axis
``tensor``, norms and residuals have ``1/t`` of the tokens; products, attention and GELU all tokens and ``1/t`` of the
features. Nothing here is fitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from course.budget import Sizes
from course.machine import Machine
from course.planning.links import collective_seconds, permute_seconds
from course.planning.training import Training


@dataclass(frozen=True)
class Passes:
    """Seconds of a part of the model for one microbatch on one device.

    Attributes:
        forward, backward: Kernels alone.
        sent_forward, sent_backward: What the pass takes longer for what is sent over ``tensor``.
        again: Of the forward pass, what remat computes a second time, by the name of the remat.
        sent_again: What that takes longer for what is sent.
    """

    forward: float
    backward: float
    sent_forward: float = 0.0
    sent_backward: float = 0.0
    again: Mapping[str, float] = field(default_factory=dict)
    sent_again: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TensorRank:
    """One device of a group along ``tensor``, and its share of a microbatch.

    Attributes:
        machine: What it belongs to.
        training: What is the same on every mesh.
        group: The devices that share each layer.
        sequences: Of a microbatch.
    """

    machine: Machine
    training: Training
    group: tuple[int, ...]
    sequences: int

    @property
    def parts(self) -> int:
        return len(self.group)

    def kernel(self, elements: float, element: int = 0) -> float:
        """Of elementwise work that reads and writes so many elements, of the training's size unless said."""
        return self.machine.kernel_seconds(elements * (element or self.training.element))

    def product(
        self, rows: float, inner: float, columns: float, *, batch: float = 1, bytes_moved: float = 0, dtype: str = ""
    ) -> float:
        """Of ``batch`` products ``[rows, inner] x [inner, columns]``."""
        moved = bytes_moved or self.training.element * batch * (rows * inner + inner * columns + rows * columns)
        return self.machine.matmul_seconds(2.0 * batch * rows * inner * columns, moved, dtype or self.training.dtype)

    def gathered(self, rows: int, inner: int, columns: int, keep: bool) -> tuple[float, float]:
        """A product of all rows, of which this device has ``1/parts``: seconds of kernels, and what sending adds.

        ``keep`` says that the rows are put together as well, for the gradient of the kernel.
        """
        whole, size = self.product(rows, inner, columns), self.training.element * rows * inner
        if self.parts == 1:
            return whole, 0.0
        if not self.training.rings:
            return whole, collective_seconds(self.machine, "all_gather", self.group, size)
        chunk = rows / self.parts
        step = self.product(chunk, inner, columns) + self.kernel(2 * chunk * (columns + keep * inner))
        filled = self.kernel(rows * (columns + keep * inner))  # with zeros, before chunks are put in their places
        return self._ring(whole, filled + step, step, size)

    def scattered(self, rows: int, inner: int, columns: int) -> tuple[float, float]:
        """A product whose rows are summed over the group, and scattered: as ``gathered`` gives it."""
        whole, size = self.product(rows, inner, columns), self.training.element * rows * columns
        if self.parts == 1:
            return whole, 0.0
        if not self.training.rings:
            return whole, collective_seconds(self.machine, "reduce_scatter", self.group, size)
        chunk = rows / self.parts
        first = self.product(chunk, inner, columns)
        return self._ring(whole, first, first, size, self.kernel(3 * chunk * columns))

    def _ring(self, whole: float, first: float, step: float, size: float, behind: float = 0.0) -> tuple[float, float]:
        """One chunk alone, then each step beside the transfer of a chunk; ``behind`` needs both of them."""
        sent = permute_seconds(self.machine, self.group, size / self.parts)
        return whole, first + (self.parts - 1) * (max(step, sent) + behind) - whole


def layer_passes(sizes: Sizes, rank: TensorRank) -> Passes:
    """Of one layer."""
    t, b, s, e = rank.parts, rank.sequences, sizes.seq, rank.training.element
    n, h, m, a = b * s, sizes.width, sizes.inner // t, sizes.heads // t
    d = h // sizes.heads
    own, scores, mixed = n / t * h, float(b) * a * s * s, n * h / t
    product, kernel = rank.product, rank.kernel
    # Scores are float32, and what is mixed of the training's size.
    score = product(s, d, s, batch=b * a, bytes_moved=4 * scores + 2 * mixed * e)
    softmax = 2 * kernel(scores, 4) + kernel(scores, 4 + e)
    mix = product(s, s, d, batch=b * a)
    # Norms: one reads one array and the other the two that make it; each then writes. Last, three are added.
    forward = score + softmax + mix + kernel(12 * own) + kernel(2 * n * m)
    qkv, up = rank.gathered(n, h, 3 * h // t, True), rank.gathered(n, h, m, True)
    out, down = rank.scattered(n, h // t, h), rank.scattered(n, m, h)
    dense = sum(whole for whole, _ in (qkv, up, out, down))
    sent = sum(more for _, more in (qkv, up, out, down))

    wide = product(s, s, d, batch=b * a, bytes_moved=4 * scores + (4 + e) * mixed, dtype="f32")
    backward = score_gradient(kernel, scores, e) + 2 * mix + 2 * wide
    backward += kernel(20 * own) + kernel(4 * n * m) + kernel(mixed, 8 + 4 * e)
    turned = [rank.scattered(n, 3 * h // t, h), rank.scattered(n, m, h)]
    turned += [rank.gathered(n, h, h // t, True), rank.gathered(n, h, m, True)]
    of_weights = product(h, n, 3 * h // t) + product(h, n, m) + product(h // t, n, h) + product(m, n, h)
    backward += of_weights + sum(whole for whole, _ in turned)
    # The backward pass needs everything but what the layer gave: its last product and sum are not computed again.
    again = {"none": 0.0, "attention": score + softmax, "block": forward + dense - down[0] - kernel(4 * own)}
    sent_again = {"none": 0.0, "attention": 0.0, "block": sent - down[1]}
    return Passes(forward + dense, backward, sent, sum(more for _, more in turned), again, sent_again)


def score_gradient(kernel, scores: float, element: int) -> float:
    """Of the softmax's backward pass: two kernels that read scores and the gradient of what they became."""
    return kernel(scores, 4 + element) + kernel(scores, 8 + element)


def loss_passes(sizes: Sizes, rank: TensorRank) -> Passes:
    """Of norm, logits and cross-entropy; the logits are split over ``tensor``."""
    t, n, h = rank.parts, rank.sequences * sizes.seq, sizes.width
    v, own = sizes.vocab // rank.parts, rank.sequences * sizes.seq / rank.parts * sizes.width
    logits, back = rank.gathered(n, h, v, True), rank.scattered(n, v, h)
    forward = logits[0] + rank.kernel(3 * own) + rank.kernel(2 * n * v)
    backward = rank.product(h, n, v) + back[0] + rank.kernel(7 * own) + rank.kernel(5 * n * v)
    sums = 3 * collective_seconds(rank.machine, "all_reduce", rank.group, 4.0 * n) if t > 1 else 0.0
    return Passes(forward, backward, logits[1] + sums, back[1])


def embedding_passes(sizes: Sizes, rank: TensorRank) -> Passes:
    """Of looking tokens up in a split table, and of its gradient, which is as large as the table."""
    n, h, e = rank.sequences * sizes.seq, sizes.width, rank.training.element
    own, table = n / rank.parts * h, sizes.vocab // rank.parts * h
    kinds = ("reduce_scatter", "all_gather")
    out, back = (collective_seconds(rank.machine, kind, rank.group, e * n * h) for kind in kinds)
    forward = rank.kernel(4 * n * h) + rank.kernel(2 * own)
    return Passes(forward, rank.kernel(4 * n * h) + rank.kernel(2 * own + table), out, back)

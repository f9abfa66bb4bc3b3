"""The time that one device takes for a layer, the loss and the embedding of one microbatch: roofline kernels and rings.

The kernels are those in the timeline of ``course.model.TransformerLayer`` and of the loss with a split
vocabulary: their arrays are counted below, in numbers of elements read or written. On ``t`` devices of the axis
``tensor``, norms and residuals have ``1/t`` of the tokens, or all of them without sequence parallelism; products,
attention and the MLP's elementwise work have all tokens and ``1/t`` of the features. Nothing here is fitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from course.machine import Machine
from course.planning.links import Group, Links
from course.planning.training import Training
from course.sizes import Sizes


@dataclass(frozen=True)
class Sent:
    """Seconds of transfers over one more axis that no work hides: in the forward pass, in the backward pass, and in the
    part of the forward pass that remat of a whole layer repeats."""

    forward: float = 0.0
    backward: float = 0.0
    again: float = 0.0


@dataclass(frozen=True)
class Passes:
    """Seconds that one device spends on a part of the model for one microbatch.

    Attributes:
        forward, backward: Kernels alone.
        sent_forward, sent_backward: Additional time of the pass for transfers over ``tensor``.
        again: The part of the forward pass that remat recomputes, by the name of the remat.
        sent_again: Additional time of that part for transfers.
        weights: The part of the backward pass that computes gradients of weights.
        context, expert: Additional time for transfers over these axes.
    """

    forward: float
    backward: float
    sent_forward: float = 0.0
    sent_backward: float = 0.0
    again: Mapping[str, float] = field(default_factory=dict)
    sent_again: Mapping[str, float] = field(default_factory=dict)
    weights: float = 0.0
    context: Sent = Sent()
    expert: Sent = Sent()


@dataclass(frozen=True)
class Rank:
    """One device of a group along ``tensor``, and its share of a microbatch.

    Attributes:
        machine: The machine it belongs to.
        links: Links of the machine.
        training: Settings that are the same on every mesh.
        group: The devices that share each layer.
        sequences: Sequences of a microbatch.
        tokens: Tokens of each sequence that the group has: all, unless ``context`` splits them.
        context, experts: The groups along ``context`` and ``expert``.
    """

    machine: Machine
    links: Links
    training: Training
    group: Group
    sequences: int
    tokens: int
    context: Group = range(1)
    experts: Group = range(1)

    @property
    def parts(self) -> int:
        return len(self.group)

    def own(self, tokens: int) -> float:
        """The number of these tokens whose norms this device computes."""
        return tokens / self.parts if self.training.sequence_parallel else tokens

    def kernel(self, elements: float, element: int = 0) -> float:
        """Seconds of elementwise work on this many elements read and written, by default in the compute dtype."""
        return self.machine.kernel_seconds(elements * (element or self.training.element))

    def product(
        self, rows: float, inner: float, columns: float, *, batch: float = 1, bytes_moved: float = 0, dtype: str = ""
    ) -> float:
        """Seconds of ``batch`` products ``[rows, inner] x [inner, columns]``."""
        moved = bytes_moved or self.training.element * batch * (rows * inner + inner * columns + rows * columns)
        return self.machine.matmul_seconds(2.0 * batch * rows * inner * columns, moved, dtype or self.training.dtype)

    def gathered(self, rows: int, inner: int, columns: int, keep: bool) -> tuple[float, float]:
        """Seconds of kernels, and additional ones of sending, for a product of all rows: this device has ``1/parts``.

        ``keep`` means that the rows are also assembled, for the gradient of the kernel.
        """
        whole, size = self.product(rows, inner, columns), self.training.element * rows * inner
        if self.parts == 1:
            return whole, 0.0
        if not self.training.rings:
            return whole, self.links.collective("all_gather", self.group, size)
        chunk = rows / self.parts
        step = self.product(chunk, inner, columns) + self.kernel(2 * chunk * (columns + keep * inner))
        filled = self.kernel(rows * (columns + keep * inner))  # zeros, before chunks are written in
        return self._ring(whole, filled + step, step, size)

    def scattered(self, rows: int, inner: int, columns: int) -> tuple[float, float]:
        """A product whose rows are summed over the group and scattered; returns the same as ``gathered``."""
        whole, size = self.product(rows, inner, columns), self.training.element * rows * columns
        if self.parts == 1:
            return whole, 0.0
        if not self.training.rings:
            return whole, self.links.collective("reduce_scatter", self.group, size)
        chunk = rows / self.parts
        first = self.product(chunk, inner, columns)
        return self._ring(whole, first, first, size, self.kernel(3 * chunk * columns))

    def _ring(self, whole: float, first: float, step: float, size: float, behind: float = 0.0) -> tuple[float, float]:
        """One chunk alone, then each step overlapping with the transfer of a chunk; ``behind`` needs both of them."""
        sent = self.links.permute(self.group, size / self.parts)
        return whole, first + (self.parts - 1) * (max(step, sent) + behind) - whole


def dense_passes(sizes: Sizes, rank: Rank, hidden: int) -> Passes:
    """Seconds of one layer whose MLP has this width, which may be 0."""
    t, n, h = rank.parts, rank.sequences * rank.tokens, sizes.width
    m, q = hidden // t, sizes.queries // t
    k = max(sizes.keys // t, sizes.queries // sizes.heads)
    own, gated, single = rank.own(n) * h, sizes.gated, sizes.parallel
    product, kernel = rank.product, rank.kernel
    mix, mix_back, scored, apart = (fused_attention if rank.training.kernels == "fused" else attention)(sizes, rank)
    # Norms: one reads one array, the other two arrays to be added, and each writes one. Finally, three are added.
    forward = mix + kernel((5 if single else 9) * own) + kernel((2 + gated) * n * m)
    columns, rows = _matrices(sizes, q, k, m)
    into, back = [rank.gathered(n, i, c, True) for i, c in columns], [rank.scattered(n, r, h) for r in rows]
    dense, sent = (sum(column) for column in zip(*into, *back, strict=True))

    backward = mix_back + kernel((10 if single else 20) * own) + kernel((3 + 2 * gated) * n * m)
    turned = [rank.scattered(n, c, i) for i, c in columns] + [rank.gathered(n, h, r, True) for r in rows]
    weights = sum(product(i, n, c) for i, c in columns) + sum(product(r, n, h) for r in rows)
    backward += weights
    backward += sum(whole for whole, _ in turned)
    if sizes.kv_rank:
        down = product(rank.own(n), h, sizes.query_rank + sizes.kv_rank + sizes.rope_width)
        forward, backward, weights = forward + down, backward + 2 * down, weights + down
    # The backward pass needs everything but the layer's output: its last product and sum are not recomputed. It also
    # needs the statistics of norms and softmax: separate kernels read them.
    # The second of every two products: keys, attention's output before projection, and the gated MLP's other product.
    second = product(n, h, k) + product(n, q, h) + gated * product(n, h, m)
    block = forward + dense + apart - back[-1][0] - kernel((2 if single else 1) * own)
    again = {"none": 0.0, "attention": scored + apart, "block": block, "half": second + forward - mix}
    sent_again = {"none": 0.0, "attention": 0.0, "block": sent - back[-1][1], "half": sum(extra for _, extra in into)}
    sent_back = sum(extra for _, extra in turned)
    around = ring(sizes, rank, mix, mix_back) if len(rank.context) > 1 else Sent()
    return Passes(forward + dense, backward, sent, sent_back, again, sent_again, weights, around)


def _matrices(sizes: Sizes, q: int, k: int, m: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Rows and columns of the kernels applied to the layer's inputs, and rows of those that project back to the width.

    Latent attention projects from its ranks, which each device computes for its own tokens.
    """
    h, up = sizes.width, m * (1 + sizes.gated)
    columns, rows = [(h, q + 2 * k), (h, up)], [q, m]
    if sizes.kv_rank:
        queries = q + q * sizes.rotated // sizes.queries
        columns[:1] = [(sizes.query_rank or h, queries), (sizes.kv_rank + sizes.rope_width, 2 * q)]
    if sizes.parallel and not sizes.kv_rank:
        return [(h, q + 2 * k + up)], [q + m]
    return (columns, rows) if m else (columns[:-1], rows[:-1])


def attention(sizes: Sizes, rank: Rank) -> tuple[float, float, float, float]:
    """Scores, softmax and mixing, all kept: seconds of the forward pass, of the backward pass, of scores and softmax
    alone, and the additional time when they are recomputed.

    Plain programs have float32 scores and mix values in the training's element size.
    """
    plain, e = rank.training.kernels == "plain", rank.training.element
    wide = 4 if plain else e
    b, a, s, d = rank.sequences, sizes.heads // rank.parts, sizes.seq, sizes.queries // sizes.heads
    scores, mixed = float(b) * a * s * s, float(b) * s * a * d
    product, kernel = rank.product, rank.kernel
    score = product(s, d, s, batch=b * a, bytes_moved=wide * scores + 2 * mixed * e)
    scored = score + kernel(scores, wide + e)
    mix = product(s, s, d, batch=b * a)
    dtype = "f32" if plain else ""
    turned = product(s, s, d, batch=b * a, bytes_moved=wide * scores + (wide + e) * mixed, dtype=dtype)
    # Two kernels read scores and the gradient of the softmax's output; the gradients of q, k and v share one array.
    back = kernel(scores, wide + e) + kernel(scores, 2 * wide + e) + kernel(mixed, 2 * wide + 4 * e)
    return scored + mix, back + 2 * mix + 2 * turned, scored, 2 * kernel(scores, wide)


def fused_attention(sizes: Sizes, rank: Rank) -> tuple[float, float, float, float]:
    """The same for one kernel that keeps no scores: masked scores are skipped, and the backward pass recomputes scores,
    which turns two products into five (Dao 2023, FlashAttention-2).

    If tokens are split over ``context``, each device has an early and a late chunk, and thus an equal share of the
    scores that are not masked. It computes them block by block, and merges the blocks' outputs.
    """
    blocks, t, element = len(rank.context), rank.parts, rank.training.element
    tokens = rank.sequences * rank.tokens
    arrays = 2.0 * tokens * (sizes.queries + sizes.keys) / t * element
    flops = 2.0 * tokens * rank.tokens * (sizes.queries + sizes.rotated / 2) / t
    forward, backward = (
        blocks * rank.machine.matmul_seconds(times * flops, moved * arrays, rank.training.dtype)
        for times, moved in ((1, 1), (2.5, 2))
    )
    merged = (blocks - 1) * rank.kernel(3 * tokens * sizes.queries / t) if blocks > 1 else 0.0
    return forward + merged, backward, 0.0, 0.0


def ring(sizes: Sizes, rank: Rank, forward: float, backward: float) -> Sent:
    """Seconds of sending keys and values over ``context`` that attention does not hide.

    In a ring, each step but the last passes a block on while it computes with it; the backward pass also passes on the
    gradients of keys and values, for one more step, until they are back where they belong. Nothing hides the gathering
    of keys and values; their gradients are scattered.
    """
    group, steps, links = rank.context, len(rank.context), rank.links
    block = 2 * rank.training.element * rank.sequences * rank.tokens * key_columns(sizes, rank.parts)
    if rank.training.context_attention == "gathered":
        gather = links.collective("all_gather", group, steps * block)
        return Sent(gather, gather + links.collective("reduce_scatter", group, steps * block), gather)
    sent, sent_with_gradients = links.permute(group, block), links.permute(group, 2 * block)
    exposed_forward = (steps - 1) * max(0.0, sent - forward / steps)
    return Sent(exposed_forward, (steps - 1) * max(0.0, sent_with_gradients - backward / steps) + sent, exposed_forward)


def key_columns(sizes: Sizes, tensor: int) -> float:
    """Columns of keys, or of values, on a device of ``tensor``: at least those of one head. For latent attention, the
    mean of both: only keys have the rotated features."""
    return max(sizes.keys // tensor, sizes.queries // sizes.heads) + sizes.rotated / tensor / 2


def loss_passes(sizes: Sizes, rank: Rank) -> Passes:
    """Seconds of norm, logits and cross-entropy; the logits are split over ``tensor``."""
    t, n, h = rank.parts, rank.sequences * rank.tokens, sizes.width
    v, own = -(-sizes.vocab // rank.parts), rank.own(n) * h
    logits, back = rank.gathered(n, h, v, True), rank.scattered(n, v, h)
    forward = logits[0] + rank.kernel(3 * own) + rank.kernel(2 * n * v)
    backward = rank.product(h, n, v) + back[0] + rank.kernel(7 * own) + rank.kernel(5 * n * v)
    sums = 3 * rank.links.collective("all_reduce", rank.group, 4.0 * n) if t > 1 else 0.0
    return Passes(forward, backward, logits[1] + sums, back[1])


def embedding_passes(sizes: Sizes, rank: Rank) -> Passes:
    """Seconds of looking up tokens in a split table, and of its gradient, which is as large as the table."""
    n, h, e = rank.sequences * rank.tokens, sizes.width, rank.training.element
    own, table = rank.own(n) * h, -(-sizes.vocab // rank.parts) * h
    kinds = ("reduce_scatter", "all_gather")
    out, back = (rank.links.collective(kind, rank.group, e * n * h) for kind in kinds)
    forward = rank.kernel(4 * n * h) + rank.kernel(2 * own)
    return Passes(forward, rank.kernel(4 * n * h) + rank.kernel(2 * own + table), out, back)

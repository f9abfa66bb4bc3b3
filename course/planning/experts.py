"""The time that one device takes for the experts of a mixture, for one microbatch, and for a whole layer with them.

Tokens are split over ``expert`` as over ``data``, and experts over ``expert``: a token travels to each expert that
computes it, and back. No token is dropped, and all experts get the same number. Each expert is split over ``tensor``
like an MLP.
"""

from __future__ import annotations

from dataclasses import replace

from course.planning.layers import Passes, Rank, Sent, dense_passes
from course.sizes import Sizes


def layer_passes(sizes: Sizes, rank: Rank) -> Passes:
    """Seconds of one layer; for a mixture, the mean over its layers."""
    if not sizes.experts:
        return dense_passes(sizes, rank, sizes.inner)
    mixture = mixture_passes(sizes, rank)
    if not sizes.dense_layers:
        return mixture
    return _mean(dense_passes(sizes, rank, sizes.inner), mixture, sizes.dense_layers / sizes.layers)


def mixture_passes(sizes: Sizes, rank: Rank) -> Passes:
    """Seconds of one layer with experts: attention, shared experts, the router and the routed experts."""
    rest, kernel, h = dense_passes(sizes, rank, sizes.shared_inner), rank.kernel, sizes.width
    own = rank.own(rank.sequences * rank.tokens)
    copies = sizes.experts_per_token * own
    # Copies of tokens are put in the order of their experts; the results are put back, weighted and added.
    moving = kernel(2 * copies * h) + kernel((copies + own) * h)
    router = rank.product(own, h, sizes.experts)
    forward, weights, backward, sent = _experts(sizes, rank)
    forward += router + moving
    sides = 2 * rank.links.collective("all_to_all", rank.experts, rank.training.element * copies * h)
    return replace(
        rest,
        forward=rest.forward + forward,
        backward=rest.backward + backward + weights + 2 * router + moving,
        sent_forward=rest.sent_forward + sent,
        sent_backward=rest.sent_backward + sent,
        # Gradients of the gates need the experts' outputs: all of it is recomputed.
        again={**rest.again, "block": rest.again["block"] + forward},
        sent_again={**rest.sent_again, "block": rest.sent_again["block"] + sent},
        weights=rest.weights + weights + router,
        expert=Sent(sides, sides, sides),
    )


def _experts(sizes: Sizes, rank: Rank) -> tuple[float, float, float, float]:
    """Seconds of a device's experts: for the forward pass, for gradients of weights, for the rest of the backward pass,
    and for gathering and scattering tokens over ``tensor``, which each pass does once."""
    h, inner, gated = sizes.width, sizes.expert_inner // rank.parts, sizes.gated
    rows = rank.sequences * rank.tokens * sizes.experts_per_token
    experts, columns = sizes.experts // len(rank.experts), inner * (1 + gated)
    rows_per_expert = rows / experts

    def product(*dims: float) -> float:
        return rank.product(*dims, batch=experts)

    forward = (
        product(rows_per_expert, h, columns)
        + product(rows_per_expert, inner, h)
        + rank.kernel((2 + gated) * rows * inner)
    )
    weights = product(h, rows_per_expert, columns) + product(inner, rows_per_expert, h)
    backward = (
        product(rows_per_expert, columns, h)
        + product(rows_per_expert, h, inner)
        + rank.kernel((3 + 2 * gated) * rows * inner)
    )
    kinds = ("all_gather", "reduce_scatter")
    sent = sum(rank.links.collective(kind, rank.group, rank.training.element * rows * h) for kind in kinds)
    return forward, weights, backward, sent


def _mean(dense: Passes, mixture: Passes, share: float) -> Passes:
    """The mean of each figure, with the weight ``share`` for dense layers."""

    def mean(one: float, other: float) -> float:
        return share * one + (1 - share) * other

    def sent(one: Sent, other: Sent) -> Sent:
        return Sent(mean(one.forward, other.forward), mean(one.backward, other.backward), mean(one.again, other.again))

    return Passes(
        mean(dense.forward, mixture.forward),
        mean(dense.backward, mixture.backward),
        mean(dense.sent_forward, mixture.sent_forward),
        mean(dense.sent_backward, mixture.sent_backward),
        {remat: mean(seconds, mixture.again[remat]) for remat, seconds in dense.again.items()},
        {remat: mean(seconds, mixture.sent_again[remat]) for remat, seconds in dense.sent_again.items()},
        mean(dense.weights, mixture.weights),
        sent(dense.context, mixture.context),
        sent(dense.expert, mixture.expert),
    )

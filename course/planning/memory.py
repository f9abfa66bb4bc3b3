"""Bytes that a planned step holds on one device at its peak, by closed forms.

State is counted as ``course.budget`` counts it, leaf by leaf. Activations are what JAX's autodiff saves of the
course's Transformer, whose norms keep what they compute on the way and whose GELU keeps its steps: more than fused
kernels need, and what a program of these chapters holds.
"""

from __future__ import annotations

from course.budget import OPTIMIZERS, PLANS, Row, Sizes, held, leaves
from course.planning.choices import Choice
from course.planning.training import Training
from course.schedules import num_ticks


def memory_rows(sizes: Sizes, batch: int, choice: Choice, training: Training) -> tuple[Row, ...]:
    """What is counted, the parts of the state first."""
    plan, e = PLANS[training.plan], training.element
    moments, extra = OPTIMIZERS[training.optimizer]
    own = held(sizes, choice.mesh, choice.fsdp, 0)
    each = plan.master + moments * plan.moment + extra
    rows = [
        Row("parameters", plan.parameter * own, f"{plan.parameter} x {own:,}"),
        Row("gradients", plan.gradient * own, f"{plan.gradient} x {own:,}"),
        Row("optimizer", each * own, f"{each} x {own:,}"),
    ]
    work = _weights_at_work(sizes, choice, training)
    rows.append(Row("weights at work", work, "groups of layers that are whole"))

    sequences = batch // choice.data // choice.microbatches
    layers = sizes.layers // choice.pipe // choice.repeats
    ticks = num_ticks(choice.pipe, choice.microbatches, choice.repeats)
    kept, one, gradients = layer_bytes(sizes, choice.tensor, sequences, choice.remat, e)
    between = e * sequences * sizes.seq * sizes.width // choice.tensor
    rows.append(Row("activations", ticks * layers * kept, f"{ticks} x {layers} x {kept:,}", "ticks x layers x bytes"))
    rows.append(Row("microbatches", (2 * choice.microbatches + ticks) * between,
                    f"{2 * choice.microbatches + ticks} x {between:,}", "what goes in and comes out"))  # fmt: skip
    at_work = max(one * (choice.remat != "none") + gradients, logit_bytes(sizes, choice.tensor, sequences, e))
    rows.append(Row("at work", at_work, "", "a layer in its backward pass, or the logits of a microbatch"))
    return tuple(rows)


def layer_bytes(sizes: Sizes, tensor: int, sequences: int, remat: str, element: int) -> tuple[int, int, int]:
    """What one layer keeps of a microbatch for its backward pass; all that it computes; and the largest gradients.

    Of the width, a device has eight arrays with its part of the tokens, two of them (what enters the products) with
    all tokens if the layer is split, and four with its part of the features; six of the MLP's inner width; and of the
    scores one in float32 and one of the training's size.
    """
    tokens, t, e = sequences * sizes.seq, tensor, element
    own, whole = tokens * sizes.width // t, tokens * sizes.width
    scores = sequences * sizes.heads * sizes.seq**2 // t
    plain = e * (6 * own + 2 * (whole if t > 1 else own) + 4 * own + 6 * tokens * sizes.inner // t)
    both = (4 + e) * scores
    kept = {"none": plain + both, "attention": plain, "block": e * own}[remat]
    return kept, plain + both, both


def logit_bytes(sizes: Sizes, tensor: int, sequences: int, element: int) -> int:
    """Logits of a microbatch, their gradient, and one more array while it is computed."""
    return 3 * element * sequences * sizes.seq * sizes.vocab // tensor


def group_elements(sizes: Sizes, choice: Choice) -> int:
    """Parameters of the layers of one repeat, as a device computes with them: whole over ``data``."""
    one = sum(leaf.elements / (choice.tensor if leaf.split else 1) for leaf in leaves(sizes).values() if leaf.layered)
    return round(one / choice.pipe / choice.repeats)


def end_elements(sizes: Sizes, tensor: int) -> int:
    """Parameters of embedding and head, as a device computes with them."""
    every = (leaf for leaf in leaves(sizes).values() if not leaf.layered)
    return round(sum(leaf.elements / (tensor if leaf.split else 1) for leaf in every))


def _weights_at_work(sizes: Sizes, choice: Choice, training: Training) -> int:
    """Two groups of layers are there at a time, this one's and the next one's; of what ``data`` splits, with their
    whole gradients and the ends of the model."""
    plan, e = PLANS[training.plan], training.element
    group, several = group_elements(sizes, choice), min(2, choice.repeats)
    if choice.fsdp:
        return (e + plan.gradient) * (several * group + end_elements(sizes, choice.tensor))
    return e * several * group if several > 1 or e != plan.parameter else 0

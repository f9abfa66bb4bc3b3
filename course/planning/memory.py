"""Bytes resident on one device at the peak of a planned step, by closed forms.

State is counted as ``course.budget`` counts it, leaf by leaf. Activations are what JAX's autodiff saves of the
course's Transformer, whose norms keep what they compute on the way and whose GELU keeps its steps: more than fused
kernels need, and what a program of these chapters holds.
"""

from __future__ import annotations

from functools import cache

from course.budget import OPTIMIZERS, PLANS, Sizes, leaves, resident_parameters
from course.planning.choices import Choice
from course.planning.training import Training
from course.schedules import num_ticks

MEANINGS = {
    "parameters": "this device's part",
    "gradients": "as large",
    "optimizer": "its copy of the parameters, and its means",
    "weights at work": "groups of layers that are whole, and their gradients",
    "activations": "what ticks keep for the backward pass",
    "microbatches": "what goes into the layers and comes out of the last repeat",
    "at work": "a tick in its backward pass, or the logits of a microbatch",
}
STATE = ("parameters", "gradients", "optimizer")


def memory_by_name(sizes: Sizes, batch: int, choice: Choice, training: Training) -> dict[str, int]:
    """Bytes on one device, all of ``MEANINGS``."""
    plan, e = PLANS[training.plan], training.element
    moments, extra = OPTIMIZERS[training.optimizer]
    own = resident_elements(sizes, choice.data if choice.fsdp else 1, choice.pipe, choice.tensor)

    sequences = batch // choice.data // choice.microbatches
    layers = sizes.layers // choice.pipe // choice.repeats
    ticks = num_ticks(choice.pipe, choice.microbatches, choice.repeats)
    every, scores = layer_bytes(sizes, choice.tensor, sequences, e)
    between = e * sequences * sizes.seq * sizes.width // choice.tensor
    kept = {"none": layers * every, "attention": layers * (every - scores), "block": between}[choice.remat]
    # The MLP's arrays, half of them where no loop saves them: what is fused is then not written.
    mlp = 6 * e * sequences * sizes.seq * sizes.inner // choice.tensor
    again = {"none": 0, "attention": scores, "block": layers * (every - mlp // 2)}[choice.remat]
    # Gradients of the scores are as large as they are, and there when the MLP's arrays are gone. The ends of the model
    # are whole when no layer is at work.
    layer = again + max(0, scores - mlp // 2)
    ends = choice.fsdp * (e + plan.gradient) * end_elements(sizes, choice.tensor)
    loss = logit_bytes(sizes, choice.tensor, sequences, e) + round(ends)
    block = 2 * choice.microbatches + choice.microbatches + choice.pipe - 1
    return {
        "parameters": plan.parameter * own,
        "gradients": plan.gradient * own,
        "optimizer": (plan.master + moments * plan.moment + extra) * own,
        "weights at work": _weights_at_work(sizes, choice, training),
        "activations": ticks * kept,
        "microbatches": block * between,
        "at work": max(layer, loss),
    }


def layer_bytes(sizes: Sizes, tensor: int, sequences: int, element: int) -> tuple[int, int]:
    """Bytes that one layer saves of a microbatch for its backward pass, and those of them in attention's scores.

    Of the width, a device has eight arrays with its part of the tokens, two of them (what enters the products) with
    all tokens if the layer is split, and four with its part of the features; six of the MLP's inner width; and of the
    scores one in float32 and one of the training's size.
    """
    tokens, t = sequences * sizes.seq, tensor
    own, whole = tokens * sizes.width // t, tokens * sizes.width
    scores = (4 + element) * (sequences * sizes.heads * sizes.seq**2 // t)
    plain = 6 * own + 2 * (whole if t > 1 else own) + 4 * own + 6 * tokens * sizes.inner // t
    return element * plain + scores, scores


def logit_bytes(sizes: Sizes, tensor: int, sequences: int, element: int) -> int:
    """Logits of a microbatch, their gradient, and one more array while it is computed."""
    return 3 * element * sequences * sizes.seq * sizes.vocab // tensor


@cache
def resident_elements(sizes: Sizes, data: int, pipe: int, tensor: int) -> int:
    """Parameters resident on one device; ``data`` is 1 where that axis does not split them."""
    return resident_parameters(sizes, {"data": data, "pipe": pipe, "tensor": tensor}, data > 1, 0)


@cache
def layer_elements(sizes: Sizes, tensor: int) -> float:
    """Parameters of all layers, as a device of ``tensor`` computes with them."""
    return sum(leaf.elements / (tensor if leaf.split else 1) for leaf in leaves(sizes).values() if leaf.layered)


@cache
def end_elements(sizes: Sizes, tensor: int) -> float:
    """Parameters of embedding and head, as a device of ``tensor`` computes with them."""
    return sum(leaf.elements / (tensor if leaf.split else 1) for leaf in leaves(sizes).values() if not leaf.layered)


def group_elements(sizes: Sizes, choice: Choice) -> float:
    """Parameters of the layers of one repeat, as a device computes with them: whole over ``data``."""
    return layer_elements(sizes, choice.tensor) / (choice.pipe * choice.repeats)


def _weights_at_work(sizes: Sizes, choice: Choice, training: Training) -> int:
    """Each block of ticks has the weights of two groups of layers, this one's and the one before.

    With remat two pairs are there at a time, and the gradients of one; without it those of all blocks are kept.
    """
    pairs = choice.repeats if choice.remat == "none" else min(2, choice.repeats)
    return round(2 * group_elements(sizes, choice) * (pairs * training.element + PLANS[training.plan].gradient))

"""Bytes resident on one device at the peak of a planned step, in closed form.

State is counted as ``course.budget`` counts it, leaf by leaf. Layers keep for the backward pass what their
kernels keep: Korthikanti et al. 2022, section 4, written for any model, with or without the scores of attention; or,
for the course's own step, what JAX's autodiff saves for the course's Transformer, which is more. The number of
microbatches in flight depends on the schedule: ``course.schedules.activations_form`` has the closed forms.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from course.budget import OPTIMIZERS, PRECISIONS, saved_per_layer
from course.planning.choices import Choice, group_layers
from course.planning.elements import (
    end_elements,
    group_elements,
    layer_elements,
    own_elements,
    parts_of_copies,
    routed_elements,
)
from course.planning.layers import key_columns
from course.planning.training import Training
from course.schedules import num_ticks
from course.schedules.measures import activations_form
from course.sizes import Sizes

MEANINGS = {
    "parameters": "this device's part",
    "gradients": "as large",
    "optimizer": "its copy of the parameters, and its means",
    "weights at work": "groups of layers that are whole, and their gradients",
    "activations": "what layers keep for the backward pass",
    "microbatches": "what goes into the layers and comes out of them",
    "at work": "a layer in its backward pass, or the logits",
}
STATE = ("parameters", "gradients", "optimizer")


def memory_by_name(sizes: Sizes, batch: int, choice: Choice, training: Training) -> dict[str, int]:
    """Bytes on one device by name, for all of ``MEANINGS``, on the stage that needs the most."""
    precision, (moments, extra) = PRECISIONS[training.precision], OPTIMIZERS[training.optimizer]
    dense, routed = own_elements(sizes, choice, choice.fsdp)
    own, part = dense + routed, dense + routed if choice.fsdp else parts_of_copies(choice, dense, routed)
    work = _course_work if choice.course else _work
    return {
        "parameters": precision.parameter * own,
        "gradients": precision.gradient * (part if choice.zero >= 2 else own),
        "optimizer": (precision.master + moments * precision.moment + extra) * (part if choice.zero >= 1 else own),
        **work(sizes, batch // choice.data // choice.expert // choice.microbatches, choice, training),
    }


def _work(sizes: Sizes, sequences: int, choice: Choice, training: Training) -> dict[str, int]:
    """Bytes other than state: on the first stage, with most microbatches in flight, or on the last, with the logits."""
    tokens = sequences * sizes.seq // choice.context
    saved, recomputed, gradients = layer_bytes(sizes, training, choice.tensor, sequences, choice.remat, choice.context)
    gradients += _around(sizes, choice, training, tokens)
    concurrent = 1 if one_by_one(choice) else choice.microbatches
    # Logits in float32, the softmax of them, and their gradient.
    logits = 3 * 4 * tokens * -(-sizes.vocab // choice.tensor)
    logits *= concurrent if not training.share_loss else -(-concurrent // choice.pipe)
    stages = []
    for stage, loss in ((0, logits * training.share_loss), (choice.pipe - 1, logits)):
        layers = in_flight(choice, stage) * -(-sizes.layers // choice.pipe)
        stages.append((round(layers * saved), max(recomputed + gradients, loss)))
    activations, at_work = max(stages, key=sum)
    split = choice.tensor if training.sequence_parallel else 1
    return {
        "weights at work": _weights_at_work(sizes, choice, training),
        "activations": activations,
        "microbatches": 2 * concurrent * training.element * tokens * sizes.width // split,
        "at work": at_work,
    }


def _around(sizes: Sizes, choice: Choice, training: Training, tokens: int) -> int:
    """Keys and values of other devices of ``context``, and their gradients: a ring's block in use and the next one, or
    all that are gathered."""
    if choice.context == 1:
        return 0
    blocks = 2 if training.context_attention == "ring" else choice.context
    return round(2 * blocks * 2 * training.element * tokens * key_columns(sizes, choice.tensor))


def one_by_one(choice: Choice) -> bool:
    """True if a microbatch's backward pass begins before all forward passes have finished."""
    return choice.alone or choice.schedule in ("1f1b", "interleaved", "zero_bubble")


def in_flight(choice: Choice, stage: int) -> float:
    """Number of microbatches whose saved activations a stage keeps in full."""
    name = choice.schedule
    if choice.alone:
        name = "interleaved" if choice.repeats > 1 else "1f1b"
    return activations_form(name, stage, choice.pipe, choice.microbatches, choice.repeats)


@cache
def layer_bytes(
    sizes: Sizes, training: Training, tensor: int, sequences: int, remat: str, context: int = 1
) -> tuple[int, int, int]:
    """Bytes per layer and microbatch: kept for the backward pass, recomputed in it, and of its gradients.

    The backward pass of the MLP has gradients of its arrays, and that of attention has gradients of its scores; in a
    plain program the MLP's arrays (half of them if no loop saves them) are freed before the scores' gradients exist.
    """
    e, sizes = training.element, replace(sizes, seq=sizes.seq // context) if context > 1 else sizes
    tokens = sequences * sizes.seq
    split = tensor if training.sequence_parallel else 1
    if training.kernels == "plain":
        total, scores = plain_bytes(sizes, tensor, sequences, e)
        mlp = 6 * e * tokens * sizes.inner // tensor // 2
        dropped, gradients = mlp, max(0, scores - mlp)
    else:
        plain, scores = saved_per_layer(sizes, e, tensor, training.dropout, training.sequence_parallel)
        scores = 0 if training.kernels == "fused" else round(sequences * scores)
        total, mlp = round(sequences * plain) + scores, e * (2 + sizes.gated) * tokens * sizes.active_inner // tensor
        dropped, gradients = 0, max(mlp, 2 * e * sequences * sizes.heads * sizes.seq**2 // tensor if scores else 0)
    into = e * tokens * sizes.width // split
    if remat == "block":
        return into, total - dropped, gradients
    if remat == "half":
        # Queries, values, attention's output, and one product of the MLP; a gated MLP's last product is the seventh.
        products = e * tokens * (2 * sizes.queries + sizes.keys + sizes.inner) // tensor
        saved = min(total, into * (1 + sizes.gated) + products)
        return saved, total - saved, gradients
    return (total - scores, scores, gradients) if remat == "attention" else (total, 0, gradients)


def plain_bytes(sizes: Sizes, tensor: int, sequences: int, element: int) -> tuple[int, int]:
    """Bytes that one layer of the course's Transformer saves per microbatch, and the part in attention's scores.

    A device has eight arrays of the model's width with its part of the tokens, two (the inputs of the products) with
    all tokens if the layer is split, and four with its part of the features; six of the MLP's inner width; and for the
    scores one in float32 and one of the training's element size.
    """
    tokens, t = sequences * sizes.seq, tensor
    own, whole = tokens * sizes.width // t, tokens * sizes.width
    scores = (4 + element) * (sequences * sizes.heads * sizes.seq**2 // t)
    plain = 6 * own + 2 * (whole if t > 1 else own) + 4 * own + 6 * tokens * sizes.inner // t
    return element * plain + scores, scores


def _weights_at_work(sizes: Sizes, choice: Choice, training: Training) -> int:
    """Weights that are whole while they are in use, in the dtype of computation, and their gradients.

    With FSDP and without a pipeline, these are a group of layers and the next one, gathered in advance. In a pipeline,
    they are the whole stage, because every microbatch needs it. With ZeRO-2, a group's gradient is whole until it is
    scattered.
    """
    precision, group = PRECISIONS[training.precision], sum(group_elements(sizes, choice))
    if not choice.fsdp:
        layer = layer_elements(sizes, choice.tensor) / sizes.layers + routed_elements(
            sizes, choice.tensor, choice.expert
        )
        cast = round(layer * training.element) * (precision.master == 0)
        return cast + round(group * precision.gradient) * (choice.zero == 2)
    if choice.pipe > 1:
        return round(group * choice.repeats * (training.element + precision.gradient))
    return round(group * (min(2, choice.repeats) * training.element + precision.gradient))


def _course_work(sizes: Sizes, sequences: int, choice: Choice, training: Training) -> dict[str, int]:
    """Bytes other than state of the course's own step: breadth-first, and ticks of the bubble save arrays like others.

    Each block of ticks has the weights of two groups of layers, its own and the previous one. With remat, two pairs
    exist at a time, and the gradients of one; without it, those of all blocks are kept.
    """
    precision, e = PRECISIONS[training.precision], training.element
    block, layers = choice.remat == "block", group_layers(sizes, choice)
    saved, recomputed, gradients = layer_bytes(sizes, training, choice.tensor, sequences, choice.remat)
    between = e * sequences * sizes.seq * sizes.width // choice.tensor
    # The ends of the model are whole when no layer is in use; the logits have a gradient and one more array.
    loss = 3 * e * sequences * sizes.seq * sizes.vocab // choice.tensor
    loss += round(choice.fsdp * (e + precision.gradient) * end_elements(sizes, choice.tensor))
    pairs = choice.repeats if choice.remat == "none" else min(2, choice.repeats)
    return {
        "weights at work": round(2 * group_elements(sizes, choice)[0] * (pairs * e + precision.gradient)),
        "activations": num_ticks(choice.pipe, choice.microbatches, choice.repeats) * saved * (1 if block else layers),
        "microbatches": (2 * choice.microbatches + choice.microbatches + choice.pipe - 1) * between,
        "at work": max(recomputed * (layers if block else 1) + gradients, loss),
    }

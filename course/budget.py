"""Memory of a training step in closed form: parameters, gradients, optimizer state and activations of a Transformer.

The parameters are counted leaf by leaf as in ``course.model.transformer``. Activations follow Korthikanti et
al., Reducing Activation Recomputation in Large Transformer Models (2022), sections 4 and 5, written for any element
size: in half precision with dropout they are the paper's ``s b h L / t (34 + 5 a s / h)`` bytes with sequence
parallelism, and ``s b h L (10 + 24/t + 5 a s / (h t))`` without.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from course.sizes import MAY_BE_ZERO, LeafSize, Sizes, flops_per_token, leaves

AXES = ("data", "pipe", "tensor")
REMAT = ("none", "attention", "block")


@dataclass(frozen=True)
class Precision:
    """Bytes per element of each kind of array that training keeps.

    Attributes:
        parameter, gradient: Parameters between steps, and gradients after the backward pass.
        master: The optimizer's own copy of the parameters, 0 for none.
        moment: Each running mean that the optimizer keeps.
        activation: Activations saved by the forward pass.
        meaning: Description for readers.
    """

    parameter: int
    gradient: int
    master: int
    moment: int
    activation: int
    meaning: str


PRECISIONS = {
    "float32": Precision(4, 4, 0, 4, 4, "everything in float32"),
    "cast": Precision(4, 4, 0, 4, 2, "kept in float32, computed in bfloat16"),
    "mixed": Precision(2, 2, 4, 4, 2, "half precision, with a float32 copy in the optimizer"),
    "mixed32": Precision(2, 4, 4, 4, 2, "the same, with gradients in float32"),
    "bfloat16": Precision(2, 2, 0, 2, 2, "everything in bfloat16"),
}
# Running means that an optimizer keeps, and additional bytes per parameter.
OPTIMIZERS = {"adam": (2, 0), "adam16": (2, 4), "momentum": (1, 0), "sgd": (0, 0)}


@dataclass(frozen=True)
class BudgetRow:
    """One line of a budget: bytes on one device, and how they are derived."""

    name: str
    bytes: int
    formula: str
    note: str = ""


@dataclass(frozen=True)
class Budget:
    """Bytes on one device, the largest where devices differ.

    Attributes:
        parameters: Number of parameters of the whole model.
        flops_per_token: FLOPs of a forward and a backward pass, without recomputation.
        rows: The items counted.
        left_out: Items not included in the sum.
    """

    parameters: int
    flops_per_token: int
    rows: tuple[BudgetRow, ...]
    left_out: tuple[BudgetRow, ...] = field(default=())

    @property
    def total(self) -> int:
        return sum(row.bytes for row in self.rows)

    def row(self, name: str) -> BudgetRow:
        return next(row for row in self.rows if row.name == name)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total}


def activation_bytes(
    sizes: Sizes,
    sequences: float,
    *,
    element: int = 2,
    tensor: int = 1,
    dropout: bool = True,
    sequence_parallel: bool = True,
) -> int:
    """Bytes that one device saves for the backward pass of all layers, without recomputation.

    Args:
        sizes: Sizes of the model.
        sequences: Sequences in flight on the device.
        element: Bytes per element.
        tensor: Number of devices that each layer is split over.
        dropout: Whether dropout masks are saved, one byte per element.
        sequence_parallel: Whether ``tensor`` also splits the sequence between the products of a layer.
    """
    return round(sizes.layers * sequences * sum(saved_per_layer(sizes, element, tensor, dropout, sequence_parallel)))


def saved_per_layer(
    sizes: Sizes, element: int, tensor: int, dropout: bool, sequence_parallel: bool = False
) -> tuple[float, float]:
    """Bytes per sequence and layer that grow with ``s``, and those of attention scores, which grow with ``s`` squared.

    For each norm, two arrays of the width (its input, and the input of the products after it) and a mask are whole
    on every device of a tensor axis, or split along the sequence with ``sequence_parallel``. Queries, keys, values, the
    output of attention before projection and the MLP's arrays are split: two of its inner width, three if gated. A
    layer of a mixture saves those of the experts that compute a token, and a copy of the token for each routed expert.
    """
    s, mask, norms = sizes.seq, int(dropout), 1 if sizes.parallel else 2
    whole = norms * sizes.width * (2 * element + mask) / (tensor if sequence_parallel else 1)
    split = 2 * (sizes.queries + sizes.keys + sizes.rotated) + (2 + sizes.gated) * sizes.active_inner
    split += sizes.experts_per_token * sizes.width
    return s * (whole + split * element / tensor), sizes.heads * s * s * (2 * element + mask) / tensor


def budget(
    sizes: Sizes,
    *,
    batch: int = 1,
    microbatches: int = 1,
    mesh: Mapping[str, int] | None = None,
    precision: str = "mixed",
    optimizer: str = "adam",
    remat: str = "none",
    fsdp: bool = False,
    min_size: int = 0,
    dropout: bool = True,
    sequence_parallel: bool = True,
) -> Budget:
    """Bytes that a training step needs on one device.

    Args:
        sizes: Sizes of the model.
        batch: Sequences per step, over all devices.
        microbatches: Number of parts that each device's share of the batch is split into. A pipeline has all of them
            in flight before the first backward pass; without a pipeline, one is in flight.
        mesh: Axis sizes: ``data`` splits the batch, ``tensor`` every matrix, ``pipe`` the layers.
        precision: One of ``PRECISIONS``.
        optimizer: One of ``OPTIMIZERS``; ``adam16`` counts four more bytes per parameter than ``adam``.
        remat: ``none``; ``attention`` recomputes the attention scores, ``block`` whole layers.
        fsdp: Whether ``data`` splits parameters, gradients and optimizer state as well.
        min_size: Leaves with fewer elements stay whole under ``fsdp``.
        dropout: Whether dropout masks are saved.
        sequence_parallel: Whether ``tensor`` also splits the sequence between the products of a layer, and with it
            the arrays that norms save and the inputs of layers.

    Raises:
        ValueError: A name or an axis is unknown, or a size is not divisible; the message says which.
    """
    counts = {"batch": batch, "microbatches": microbatches, "min_size": min_size}
    axes = _checked(sizes, dict(mesh or {}), counts, precision, optimizer, remat)
    if sequence_parallel and sizes.seq % axes["tensor"]:
        raise ValueError(
            f"seq {sizes.seq} is not divisible by tensor = {axes['tensor']}, as sequence parallelism needs; "
            "--no-sequence-parallel turns it off"
        )
    dtypes = PRECISIONS[precision]
    state = _state_rows(sizes, axes, dtypes, optimizer, fsdp, min_size)
    activations, left_out = _activation_rows(
        sizes, axes, dtypes, batch, microbatches, remat, dropout, sequence_parallel
    )
    return Budget(sizes.count, flops_per_token(sizes), (*state, *activations), left_out)


def _checked(
    sizes: Sizes, mesh: dict[str, int], counts: dict[str, int], precision: str, optimizer: str, remat: str
) -> dict[str, int]:
    for kind, name, known in (
        ("precision", precision, PRECISIONS),
        ("optimizer", optimizer, OPTIMIZERS),
        ("remat", remat, REMAT),
    ):
        if name not in known:
            raise ValueError(f"no {kind} is called {name!r}; there are: {', '.join(known)}")
    unknown = [axis for axis in mesh if axis not in AXES]
    if unknown:
        raise ValueError(f"mesh axis {unknown[0]!r} is not known here; the axes are: {', '.join(AXES)}")
    for name, number in [*asdict(sizes).items(), *counts.items(), *mesh.items()]:
        least = 0 if name in MAY_BE_ZERO or isinstance(number, bool) else 1
        if number < least:
            meaning = "" if least else f", which means {MAY_BE_ZERO[name]}"
            raise ValueError(f"{name} is {number}, and it must be at least {least}{meaning}")
    axes = {axis: mesh.get(axis, 1) for axis in AXES}
    for name, number, parts, by in (
        ("width", sizes.width, 1 if sizes.head_width else sizes.heads, "heads"),
        ("heads", sizes.heads, axes["tensor"], "tensor"),
        ("layers", sizes.layers, axes["pipe"], "pipe"),
        ("batch", counts["batch"], axes["data"] * counts["microbatches"], "data x microbatches"),
    ):
        if number % parts:
            raise ValueError(f"{name} {number} is not divisible by {by} = {parts}")
    return axes


def resident_parameters(sizes: Sizes, axes: dict[str, int], fsdp: bool, min_size: int) -> int:
    """Number of parameters resident on one device."""
    total = 0
    for leaf in _leaf_sizes(sizes):
        parts = (axes["tensor"] if leaf.split else 1) * (axes["pipe"] if leaf.layered else 1)
        parts *= axes["data"] if fsdp and leaf.elements >= min_size else 1
        total += math.ceil(leaf.elements / parts)
    return total


def _leaf_sizes(sizes: Sizes) -> list[LeafSize]:
    return [LeafSize(sizes.parameters, True, True)] if sizes.parameters else [*leaves(sizes).values()]


def _state_rows(
    sizes: Sizes, axes: dict[str, int], precision: Precision, optimizer: str, fsdp: bool, min_size: int
) -> tuple[BudgetRow, ...]:
    own = resident_parameters(sizes, axes, fsdp, min_size)
    moments, extra = OPTIMIZERS[optimizer]
    per_parameter = precision.master + moments * precision.moment + extra
    note = ""
    if precision.master and moments == 2:
        # The other of the two common ways to count Adam's state.
        other, name = (12, "adam") if extra else (16, "adam16")
        note = f"{other} x with {name}: {other * own / 1e6:,.0f} MB"
    rows = [
        BudgetRow(
            "parameters", precision.parameter * own, f"{precision.parameter} x {own:,}", "bytes x resident parameters"
        ),
        BudgetRow("gradients", precision.gradient * own, f"{precision.gradient} x {own:,}"),
        BudgetRow("optimizer", per_parameter * own, f"{per_parameter} x {own:,}", note),
    ]
    if fsdp and axes["data"] > 1:
        split = [leaf for leaf in _leaf_sizes(sizes) if leaf.layered and leaf.elements >= min_size]
        layer = sum(leaf.elements // sizes.layers // (axes["tensor"] if leaf.split else 1) for leaf in split)
        per_parameter = precision.activation + precision.gradient
        formula = f"({precision.activation} + {precision.gradient}) x {layer:,}"
        rows.append(BudgetRow("one layer gathered", per_parameter * layer, formula, "weights and gradient, whole"))
    return tuple(rows)


def _activation_rows(
    sizes: Sizes,
    axes: dict[str, int],
    precision: Precision,
    batch: int,
    microbatches: int,
    remat: str,
    dropout: bool,
    sequence_parallel: bool,
) -> tuple[tuple[BudgetRow, ...], tuple[BudgetRow, ...]]:
    size, t, local = precision.activation, axes["tensor"], sizes.layers // axes["pipe"]
    b = batch // axes["data"] // microbatches
    flying = b * (microbatches if axes["pipe"] > 1 else 1)
    plain, scores = saved_per_layer(sizes, size, t, dropout, sequence_parallel)
    inputs = size * sizes.seq * sizes.width / (t if sequence_parallel else 1)
    saved = {"none": plain + scores, "attention": plain, "block": inputs}[remat]
    recomputed = {"none": 0.0, "attention": scores, "block": plain + scores}[remat]
    formula = f"{flying:,} x {local:,} x {round(saved):,}"
    rows = [BudgetRow("activations", round(flying * local * saved), formula, "sequences x layers x bytes")]
    if recomputed:
        rows.append(
            BudgetRow("recomputed", round(b * recomputed), f"{b:,} x {round(recomputed):,}", "one layer at a time")
        )
    tokens, vocab = b * sizes.seq, math.ceil(sizes.vocab / t)
    note = "4 bytes x tokens x vocabulary"
    return tuple(rows), (BudgetRow("logits", 4 * tokens * vocab, f"4 x {tokens:,} x {vocab:,}", note),)

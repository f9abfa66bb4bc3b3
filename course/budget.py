"""Memory of a training step by closed forms: parameters, gradients, optimizer state and activations of a Transformer.

The parameters are counted leaf by leaf as ``course.model.transformer`` has them. Activations follow Korthikanti et
al., Reducing Activation Recomputation in Large Transformer Models (2022), sections 4 and 5, written for any element
size: in half precision with dropout they are the paper's ``s b h L (10 + 24/t + 5 a s / (h t))`` bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

AXES = ("data", "pipe", "tensor")
MAY_BE_ZERO = {
    "hidden": "four times the width",
    "parameters": "as many as the sizes make",
    "kv_heads": "as many as there are heads",
    "head_width": "the width over the heads",
    "min_size": "splitting all",
}
REMAT = ("none", "attention", "block")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder-only Transformer.

    Attributes:
        layers, width, heads, vocab, seq: As they are called.
        hidden: Width inside the MLP; 0 stands for four times ``width``.
        parameters: How many there are, where that is known otherwise; 0 has them counted.
        kv_heads: Heads of keys and values, each shared by a group of query heads; 0 stands for ``heads``.
        head_width: Of one head; 0 stands for ``width / heads``.
        gated: Whether the MLP multiplies two matrix products of its input, as SwiGLU does.
        parallel: Whether attention and MLP have one input, and are added to the residual together.
    """

    layers: int
    width: int
    heads: int
    vocab: int
    seq: int
    hidden: int = 0
    parameters: int = 0
    kv_heads: int = 0
    head_width: int = 0
    gated: bool = False
    parallel: bool = False

    @property
    def inner(self) -> int:
        return self.hidden or 4 * self.width

    @property
    def queries(self) -> int:
        """Width of all heads' queries."""
        return self.heads * (self.head_width or self.width // self.heads)

    @property
    def keys(self) -> int:
        """Width of all heads' keys; values are as wide."""
        return self.queries * (self.kv_heads or self.heads) // self.heads

    @property
    def count(self) -> int:
        """All parameters."""
        return self.parameters or sum(leaf.elements for leaf in leaves(self).values())


@dataclass(frozen=True)
class LeafSize:
    """A leaf of the parameters: its elements over all layers, and which axes split it."""

    elements: int
    layered: bool
    split: bool


@dataclass(frozen=True)
class Precision:
    """Bytes an element of each kind of array that training keeps.

    Attributes:
        parameter, gradient: Between two steps, and after the backward pass.
        master: Of the optimizer's own copy of the parameters, 0 for none.
        moment: Of each running mean that the optimizer keeps.
        activation: Of what the forward pass saves.
        meaning: In words.
    """

    parameter: int
    gradient: int
    master: int
    moment: int
    activation: int
    meaning: str


PLANS = {
    "float32": Precision(4, 4, 0, 4, 4, "everything in float32"),
    "cast": Precision(4, 4, 0, 4, 2, "kept in float32, computed in bfloat16"),
    "mixed": Precision(2, 2, 4, 4, 2, "half precision, with a float32 copy in the optimizer"),
    "mixed32": Precision(2, 4, 4, 4, 2, "the same, with gradients in float32"),
    "bfloat16": Precision(2, 2, 0, 2, 2, "everything in bfloat16"),
}
# How many running means an optimizer keeps, and bytes a parameter that it is counted beside them.
OPTIMIZERS = {"adam": (2, 0), "adam16": (2, 4), "momentum": (1, 0), "sgd": (0, 0)}


@dataclass(frozen=True)
class BudgetRow:
    """One line of a budget: bytes on one device, and how they come about."""

    name: str
    bytes: int
    formula: str
    note: str = ""


@dataclass(frozen=True)
class Budget:
    """Bytes on one device, the largest where devices differ.

    Attributes:
        parameters: Of the whole model.
        flops_per_token: Of a forward and a backward pass, without recomputation.
        rows: What is counted.
        left_out: What is not part of the sum.
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


def leaves(sizes: Sizes) -> dict[str, LeafSize]:
    """The leaves of ``course.model.transformer``'s parameters by name; those under ``layers`` over all layers."""
    d, m, v, n, q = sizes.width, sizes.inner, sizes.vocab, sizes.layers, sizes.queries
    return {
        "embed/token": LeafSize(v * d, False, True),
        "embed/position": LeafSize(sizes.seq * d, False, False),
        "layers/attention_norm/scale": LeafSize(n * d, True, False),
        "layers/attention/qkv/kernel": LeafSize(n * d * (q + 2 * sizes.keys), True, True),
        "layers/attention/out/kernel": LeafSize(n * q * d, True, True),
        "layers/mlp/norm/scale": LeafSize(n * d, True, False),
        "layers/mlp/up/kernel": LeafSize(n * d * m * (1 + sizes.gated), True, True),
        "layers/mlp/up/bias": LeafSize(n * m, True, True),
        "layers/mlp/down/kernel": LeafSize(n * m * d, True, True),
        "layers/mlp/down/bias": LeafSize(n * d, True, False),
        "head/norm/scale": LeafSize(d, False, False),
        "head/out/kernel": LeafSize(d * v, False, True),
        "head/out/bias": LeafSize(v, False, True),
    }


def flops_per_token(sizes: Sizes) -> int:
    """``6 N + 12 L d s``: forward and backward, causal masking not taken off (PaLM, appendix B).

    ``d`` is the width of all heads' queries.
    """
    return 6 * sizes.count + 12 * sizes.layers * sizes.queries * sizes.seq


def activation_bytes(sizes: Sizes, sequences: float, *, element: int = 2, tensor: int = 1, dropout: bool = True) -> int:
    """Bytes that one device saves for the backward pass of all layers, nothing recomputed.

    Args:
        sizes: Of the model.
        sequences: How many are in flight on the device.
        element: Bytes an element.
        tensor: Devices that each layer is split over.
        dropout: Whether its masks are saved, one byte an element.
    """
    return round(sizes.layers * sequences * sum(saved_per_layer(sizes, element, tensor, dropout)))


def saved_per_layer(
    sizes: Sizes, element: int, tensor: int, dropout: bool, sequence_parallel: bool = False
) -> tuple[float, float]:
    """Bytes a sequence and layer: of what grows with ``s``, and of the attention scores, which grow with its square.

    Two arrays of the width for each norm (what enters it, and what enters the products behind it) and a mask are whole
    on every device of a tensor axis, or split along the sequence with ``sequence_parallel``. Queries, keys, values,
    what attention mixes and the MLP's arrays are split: two of its inner width, three if gated.
    """
    s, mask, norms = sizes.seq, int(dropout), 1 if sizes.parallel else 2
    whole = norms * sizes.width * (2 * element + mask) / (tensor if sequence_parallel else 1)
    split = 2 * sizes.queries + 2 * sizes.keys + (2 + sizes.gated) * sizes.inner
    return s * (whole + split * element / tensor), sizes.heads * s * s * (2 * element + mask) / tensor


def budget(
    sizes: Sizes,
    *,
    batch: int = 1,
    microbatches: int = 1,
    mesh: Mapping[str, int] | None = None,
    plan: str = "mixed",
    optimizer: str = "adam",
    remat: str = "none",
    fsdp: bool = False,
    min_size: int = 0,
    dropout: bool = True,
) -> Budget:
    """Bytes that a training step needs on one device.

    Args:
        sizes: Of the model.
        batch: Sequences in a step, over all devices.
        microbatches: How many parts each device's share of the batch is run in. A pipeline has all of them in
            flight before the first backward pass, anything else one.
        mesh: Axis sizes: ``data`` splits the batch, ``tensor`` every matrix, ``pipe`` the layers.
        plan: One of ``PLANS``.
        optimizer: One of ``OPTIMIZERS``; ``adam16`` counts four bytes a parameter more than Adam has.
        remat: ``none``; ``attention`` recomputes the attention scores, ``block`` whole layers.
        fsdp: Whether ``data`` splits parameters, gradients and optimizer state as well.
        min_size: Leaves with fewer elements stay whole under ``fsdp``.
        dropout: Whether its masks are saved.

    Raises:
        ValueError: A name or an axis is unknown, or something does not divide; the message says what.
    """
    counts = {"batch": batch, "microbatches": microbatches, "min_size": min_size}
    axes = _checked(sizes, dict(mesh or {}), counts, plan, optimizer, remat)
    dtypes = PLANS[plan]
    state = _state_rows(sizes, axes, dtypes, optimizer, fsdp, min_size)
    activations, left_out = _activation_rows(sizes, axes, dtypes, batch, microbatches, remat, dropout)
    return Budget(sizes.count, flops_per_token(sizes), (*state, *activations), left_out)


def _checked(
    sizes: Sizes, mesh: dict[str, int], counts: dict[str, int], plan: str, optimizer: str, remat: str
) -> dict[str, int]:
    for what, given, known in (("plan", plan, PLANS), ("optimizer", optimizer, OPTIMIZERS), ("remat", remat, REMAT)):
        if given not in known:
            raise ValueError(f"no {what} is called {given!r}; there are: {', '.join(known)}")
    unknown = [axis for axis in mesh if axis not in AXES]
    if unknown:
        raise ValueError(f"mesh axis {unknown[0]!r} is not known here; the axes are: {', '.join(AXES)}")
    for what, number in [*asdict(sizes).items(), *counts.items(), *mesh.items()]:
        least = 0 if what in MAY_BE_ZERO or isinstance(number, bool) else 1
        if number < least:
            stands = "" if least else f", which stands for {MAY_BE_ZERO[what]}"
            raise ValueError(f"{what} is {number}, and it must be at least {least}{stands}")
    axes = {axis: mesh.get(axis, 1) for axis in AXES}
    for what, number, parts, by in (
        ("width", sizes.width, 1 if sizes.head_width else sizes.heads, "heads"),
        ("heads", sizes.heads, axes["tensor"], "tensor"),
        ("layers", sizes.layers, axes["pipe"], "pipe"),
        ("batch", counts["batch"], axes["data"] * counts["microbatches"], "data x microbatches"),
    ):
        if number % parts:
            raise ValueError(f"{what} {number} is not divisible by {by} = {parts}")
    return axes


def resident_parameters(sizes: Sizes, axes: dict[str, int], fsdp: bool, min_size: int) -> int:
    """Parameters resident on one device."""
    total = 0
    for leaf in _leaf_sizes(sizes):
        parts = (axes["tensor"] if leaf.split else 1) * (axes["pipe"] if leaf.layered else 1)
        parts *= axes["data"] if fsdp and leaf.elements >= min_size else 1
        total += math.ceil(leaf.elements / parts)
    return total


def _leaf_sizes(sizes: Sizes) -> list[LeafSize]:
    return [LeafSize(sizes.parameters, True, True)] if sizes.parameters else [*leaves(sizes).values()]


def _state_rows(
    sizes: Sizes, axes: dict[str, int], plan: Precision, optimizer: str, fsdp: bool, min_size: int
) -> tuple[BudgetRow, ...]:
    own = resident_parameters(sizes, axes, fsdp, min_size)
    moments, extra = OPTIMIZERS[optimizer]
    each = plan.master + moments * plan.moment + extra
    note = ""
    if plan.master and moments == 2:
        # The other of the two ways in which people count Adam's state.
        other, name = (12, "adam") if extra else (16, "adam16")
        note = f"{other} x with {name}: {other * own / 1e6:,.0f} MB"
    rows = [
        BudgetRow("parameters", plan.parameter * own, f"{plan.parameter} x {own:,}", "bytes x parameters held"),
        BudgetRow("gradients", plan.gradient * own, f"{plan.gradient} x {own:,}"),
        BudgetRow("optimizer", each * own, f"{each} x {own:,}", note),
    ]
    if fsdp and axes["data"] > 1:
        split = [leaf for leaf in _leaf_sizes(sizes) if leaf.layered and leaf.elements >= min_size]
        layer = sum(leaf.elements // sizes.layers // (axes["tensor"] if leaf.split else 1) for leaf in split)
        each = plan.activation + plan.gradient
        formula = f"({plan.activation} + {plan.gradient}) x {layer:,}"
        rows.append(BudgetRow("one layer gathered", each * layer, formula, "weights and gradient, whole"))
    return tuple(rows)


def _activation_rows(
    sizes: Sizes, axes: dict[str, int], plan: Precision, batch: int, microbatches: int, remat: str, dropout: bool
) -> tuple[tuple[BudgetRow, ...], tuple[BudgetRow, ...]]:
    size, t, local = plan.activation, axes["tensor"], sizes.layers // axes["pipe"]
    b = batch // axes["data"] // microbatches
    flying = b * (microbatches if axes["pipe"] > 1 else 1)
    plain, scores = saved_per_layer(sizes, size, t, dropout)
    kept = {"none": plain + scores, "attention": plain, "block": float(size * sizes.seq * sizes.width)}[remat]
    again = {"none": 0.0, "attention": scores, "block": plain + scores}[remat]
    formula = f"{flying:,} x {local:,} x {round(kept):,}"
    rows = [BudgetRow("activations", round(flying * local * kept), formula, "sequences x layers x bytes")]
    if again:
        rows.append(BudgetRow("recomputed", round(b * again), f"{b:,} x {round(again):,}", "one layer at a time"))
    tokens, vocab = b * sizes.seq, math.ceil(sizes.vocab / t)
    note = "4 bytes x tokens x vocabulary"
    return tuple(rows), (BudgetRow("logits", 4 * tokens * vocab, f"4 x {tokens:,} x {vocab:,}", note),)

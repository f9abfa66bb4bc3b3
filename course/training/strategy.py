"""Strategies for computing a model's loss and gradients on a mesh. The loop around them does not change.

A strategy is made by a plain function ``(sizes, mesh, options) -> Strategy``. The parameters are those of
``ModelSizes.model().init`` on every mesh, the same arrays with the same names; a strategy only defines their
layout. So one optimizer serves all strategies, and a checkpoint of one can be restored by another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from course import budget
from course.model import Model, Params, full_loss, transformer
from course.moe import MoEModel, moe, moe_transformer
from course.training.text import VOCAB, Batch

PyTree = Any
DTYPES = ("float32", "bfloat16")
# The dim of each leaf that a tensor axis splits: a layer's columns, then its rows, so that each pair needs one sum.
# Leaves under ``layers`` are stacked: their first dim is the layer. All leaves that are not listed are whole.
TENSOR_DIMS = {
    "embed/token": 1,
    "layers/attention/qkv/kernel": 2,
    "layers/attention/out/kernel": 1,
    "layers/mlp/up/kernel": 2,
    "layers/mlp/up/bias": 1,
    "layers/mlp/down/kernel": 1,
    "head/out/kernel": 1,
    "head/out/bias": 0,
}


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of the byte-level Transformer.

    Attributes:
        width: Width of the residual stream.
        hidden: Width inside the MLP.
        num_layers, num_heads: The usual numbers.
        seq: Tokens per row.
    """

    width: int = 128
    hidden: int = 512
    num_layers: int = 4
    num_heads: int = 4
    seq: int = 64

    def __post_init__(self):
        for name, number in vars(self).items():
            if number < 1:
                raise ValueError(f"{name} is {number}, and it must be at least 1")
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} is not divisible by num_heads {self.num_heads}")

    def model(self) -> Model:
        """The model as pure functions."""
        sizes = {name: getattr(self, name) for name in ("width", "hidden", "num_layers", "num_heads")}
        return transformer(**sizes, vocab=VOCAB, max_seq=self.seq)

    def shapes(self) -> Params:
        """The parameters' shapes."""
        return jax.eval_shape(self.model().init, jax.random.key(0))

    @property
    def model_flops(self) -> int:
        """FLOPs that the model needs per token, forward and backward.

        ``6 N + 12 L d s`` with ``N`` the weights of matmuls, as for all of the course's measurements.
        """
        weights = self.num_layers * (4 * self.width**2 + self._mlp_weights) + VOCAB * self.width
        sizes = budget.Sizes(self.num_layers, self.width, self.num_heads, VOCAB, self.seq, parameters=weights)
        return budget.flops_per_token(sizes)

    @property
    def _mlp_weights(self) -> int:
        """The weights that a token is multiplied by in place of attention, in one layer."""
        return 2 * self.width * self.hidden


@dataclass(frozen=True)
class MixtureSizes(ModelSizes):
    """Sizes of a byte-level Transformer whose MLPs are mixtures of experts, each with ``hidden`` features.

    Attributes:
        num_experts: Routed experts in a layer, besides the shared one.
        k: Number of routed experts that a token chooses.
        capacity_factor: Places of an expert, relative to those it needs if all experts are chosen equally often.
    """

    num_experts: int = 8
    k: int = 2
    capacity_factor: float = 1.25

    def __post_init__(self):
        super().__post_init__()
        if self.k > self.num_experts:
            raise ValueError(f"a token chooses k={self.k} experts, but there are only {self.num_experts}")

    def mixture(self) -> MoEModel:
        """The model as pure functions, with the layer's two parts separate."""
        sizes = {name: getattr(self, name) for name in ("width", "hidden", "num_layers", "num_heads")}
        return moe_transformer(**sizes, num_experts=self.num_experts, k=self.k, vocab=VOCAB, max_seq=self.seq)

    def model(self) -> Model:
        """The model on one device, where experts have places for all tokens."""
        mixture = self.mixture()

        def layer(params: Params, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
            del key  # there is no dropout
            x, normed = mixture.attend(params, x)
            tokens = normed.reshape(-1, self.width)
            return x + moe(params["moe"], tokens, self.k, len(tokens))[0].reshape(x.shape)

        return Model(self.num_layers, mixture.init, mixture.embed, layer, mixture.loss)

    def capacity(self, tokens: int) -> int:
        """Number of places that an expert has for a device's tokens."""
        return min(tokens, math.ceil(self.capacity_factor * self.k * tokens / self.num_experts))

    @property
    def _mlp_weights(self) -> int:
        return 2 * self.width * self.hidden * (self.k + 1) + self.width * self.num_experts


@dataclass(frozen=True)
class StrategyOptions:
    """Options of a strategy, which raises if it does not support a requested one.

    Attributes:
        num_microbatches: Number of parts that each device's rows are split into.
        remat: Whether layers are recomputed in the backward pass.
        dtype: Compute dtype of the layers; parameters, gradients and the optimizer's state are float32.
        min_size: Leaves with fewer elements are not split over ``data``.
        num_repeats: Number of times that a microbatch passes through each stage of a pipeline.
        rings: Whether activations of split layers travel in rings that overlap with the matmuls.
    """

    num_microbatches: int = 1
    remat: bool = False
    dtype: str = "float32"
    min_size: int = 1024
    num_repeats: int = 1
    rings: bool = False

    def __post_init__(self):
        for name in ("num_microbatches", "num_repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, and it must be at least 1")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, and it must be one of: {', '.join(DTYPES)}")


# --8<-- [start:strategy]
@dataclass(frozen=True)
class Strategy:
    """The computation of the loss and its gradient on a mesh. The functions are traced under ``jax.jit``.

    Attributes:
        name: Name of the strategy.
        specs: The ``PartitionSpec`` of each parameter, and of its gradient.
        batch_spec: Spec of ``inputs`` and ``targets``, ``[batch, seq]``; only rows may be split.
        loss: ``(params, batch) -> scalar``, the mean over all rows, the same on every device; without the losses of a
            mixture's router.
        loss_and_gradients: ``(params, batch) -> (loss, gradients)``: that loss, and its gradient, in whole arrays like
            the parameters. The gradient includes the losses of a mixture's router.
    """

    name: str
    specs: PyTree
    batch_spec: P
    loss: Callable[[Params, Batch], jax.Array]
    loss_and_gradients: Callable[[Params, Batch], tuple[jax.Array, Params]]


# A mesh without devices is enough to export.
MakeStrategy = Callable[[ModelSizes, Mesh | AbstractMesh, StrategyOptions], Strategy]
# --8<-- [end:strategy]


def require_axes(name: str, mesh: Mesh | AbstractMesh, axes: tuple[str, ...], advice: str = "") -> None:
    """Raise ``ValueError`` for a mesh that splits over anything but ``axes``."""
    for axis, size in mesh.shape.items():
        if axis not in axes and size > 1:
            known = " and ".join(axes)
            raise ValueError(f"the strategy {name} splits only over {known}, but the mesh has {axis}={size}{advice}")


def compiler(sizes: ModelSizes, mesh: Mesh | AbstractMesh, options: StrategyOptions) -> Strategy:
    """The compiler's own partitioning: the single-device loss under ``jax.jit``, with the sharding of each array.

    Rows are split over ``data``, and so is every large parameter; heads, hidden features and vocabulary over
    ``tensor``. Two kinds of constraints guide the compiler: each layer's weights are whole over ``data`` while the
    layer computes, and its activations keep their rows in place. The compiler inserts every collective.

    Raises:
        ValueError: The mesh splits over another axis, ``tensor`` does not divide a size, or there is no such option.
    """
    require_axes("compiler", mesh, ("data", "tensor"), ": XLA's partitioner does not support pipelines")
    if options.rings or options.num_repeats > 1:
        raise ValueError("the strategy compiler has no rings and no repeats: leave these options out")
    data, tensor = (mesh.shape.get(axis, 1) for axis in ("data", "tensor"))
    for name in ("num_heads", "width", "hidden"):
        if getattr(sizes, name) % tensor:
            raise ValueError(f"{name} {getattr(sizes, name)} is not divisible by tensor={tensor}")
    shapes = sizes.shapes()
    split = jax.tree.map_with_path(lambda path, _: _tensor_spec(path, tensor), shapes)
    specs = jax.tree.map_with_path(
        lambda path, leaf, spec: _data_spec(path, leaf, spec, data, options.min_size), shapes, split
    )
    rows = P("data") if data > 1 else P()
    model = _guided(sizes.model(), split, rows, mesh, options)

    def loss(params: Params, batch: Batch) -> jax.Array:
        return full_loss(model, params, batch)

    def loss_and_gradients(params: Params, batch: Batch) -> tuple[jax.Array, Params]:
        return accumulated(jax.value_and_grad(loss), params, batch, options.num_microbatches)

    return Strategy("compiler", specs, rows, loss, loss_and_gradients)


def accumulated(
    gradients_of: Callable, params: Params, batch: Batch, num_microbatches: int
) -> tuple[jax.Array, Params]:
    """``gradients_of(params, batch)`` as the mean over microbatches, each with its share of every device's rows."""
    if num_microbatches == 1:
        return gradients_of(params, batch)
    parts = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, num_microbatches, *x.shape[1:]), 1, 0), batch)

    def step(total, part):
        return jax.tree.map(jnp.add, total, gradients_of(params, part)), None

    start = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    total, _ = jax.lax.scan(step, start, parts)
    return jax.tree.map(lambda leaf: leaf / num_microbatches, total)


def _tensor_spec(path: tuple[Any, ...], tensor: int) -> P:
    """The spec over ``tensor`` alone."""
    dim = TENSOR_DIMS.get(jax.tree_util.keystr(path, simple=True, separator="/"))
    return P() if dim is None or tensor == 1 else P(*[None] * dim, "tensor")


def _data_spec(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, spec: P, data: int, min_size: int) -> P:
    """Add ``data`` to the spec of the largest other dim that it divides, but never to the layers dim."""
    dims = [*spec, *[None] * (leaf.ndim - len(spec))]
    first = 1 if path[0].key == "layers" else 0
    free = [dim for dim in range(first, leaf.ndim) if dims[dim] is None and leaf.shape[dim] % data == 0]
    if data == 1 or leaf.size < min_size or not free:
        return spec
    dims[max(free, key=lambda dim: leaf.shape[dim])] = "data"
    return P(*dims)


def _guided(model: Model, split: PyTree, rows: P, mesh: Mesh | AbstractMesh, options: StrategyOptions) -> Model:
    """The model with weights gathered over ``data`` when used, in ``options.dtype``, and rows kept in place."""

    def weights(params: Params, specs: PyTree) -> Params:
        constrained = jax.tree.map(lambda leaf, spec: _constrain(leaf, mesh, spec), params, specs)
        return jax.tree.map(lambda leaf: leaf.astype(options.dtype), constrained)

    def embed(params: Params, inputs: jax.Array) -> jax.Array:
        return _constrain(model.embed(weights(params, split["embed"]), inputs), mesh, rows)

    def layer(params: Params, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        return _constrain(model.layer(weights(params, of_layer), x, key), mesh, rows)

    def loss(params: Params, x: jax.Array, targets: jax.Array) -> jax.Array:
        return model.loss(weights(params, split["head"]), x, targets)

    of_layer = jax.tree.map(lambda spec: P(*spec[1:]), split["layers"], is_leaf=lambda spec: isinstance(spec, P))
    return replace(model, embed=embed, layer=jax.checkpoint(layer) if options.remat else layer, loss=loss)


def _constrain(x: jax.Array, mesh: Mesh | AbstractMesh, spec: P) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

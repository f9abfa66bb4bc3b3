"""What the functions of ``tp_transformer`` share: models, who holds what, and how activations travel in the checks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.contract import Case, Evidence
from course.layout import tensor_specs
from course.model import Model, full_loss, split_heads, transformer

OTHER = "other collectives"
EVERY = ("all_gather", "reduce_scatter", "all_reduce", "collective_permute", "all_to_all")
SIZES = {"width": 16, "hidden": 40, "num_heads": 8, "num_layers": 2, "vocab": 56, "seq": 24, "max_seq": 32, "rows": 2,
         "dropout": 25, "parallel": 0}  # fmt: skip


def tensor_of(case: Case) -> str:
    """The axis that features are split over: ``tensor`` where there is one, else the last."""
    return "tensor" if "tensor" in case.mesh else list(case.mesh)[-1]


def parts_of(case: Case) -> int:
    """Its size: in how many parts features and sequences are split."""
    return case.mesh[tensor_of(case)]


def others_of(case: Case) -> tuple[str, ...]:
    """The axes along which the rows of a batch are split: all others."""
    return tuple(axis for axis in case.mesh if axis != tensor_of(case))


def groups_of(case: Case) -> int:
    """How many devices there are for each place on the tensor axis, each with sequences of its own."""
    return math.prod(case.mesh[axis] for axis in others_of(case))


def rows_of(case: Case) -> int:
    """Sequences in the whole batch."""
    return case.sizes["rows"] * groups_of(case)


def model_of(case: Case) -> Model:
    """The course's model on one device."""
    return _model_of(tuple(case.sizes.items()))


def params_of(case: Case) -> Any:
    """Shapes of its parameters, heads apart."""
    return _params_of(tuple(case.sizes.items()))


def layer_of(case: Case) -> Any:
    """Shapes of one layer's."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params_of(case)["layers"])


@lru_cache(maxsize=64)
def _model_of(sizes: tuple[tuple[str, int], ...]) -> Model:
    s = dict(sizes)
    return transformer(width=s["width"], hidden=s["hidden"], num_layers=s["num_layers"], num_heads=s["num_heads"],
                       vocab=s["vocab"], max_seq=s["max_seq"], dropout=s["dropout"] / 100,
                       parallel=bool(s["parallel"]))  # fmt: skip


@lru_cache(maxsize=64)
def _params_of(sizes: tuple[tuple[str, int], ...]) -> Any:
    def init():
        params = _model_of(sizes).init(jax.random.key(0))
        params["layers"]["attention"] = split_heads(params["layers"]["attention"], dict(sizes)["num_heads"])
        return params

    return jax.eval_shape(init)


def heads_together(layers: Any) -> Any:
    """One layer's parameters, or those of stacked layers, as the course's model has them."""
    qkv, out = (layers["attention"][name]["kernel"] for name in ("qkv", "out"))
    *stacked, _, _, width = out.shape
    kernels = {"qkv": qkv.reshape(*stacked, width, -1), "out": out.reshape(*stacked, -1, width)}
    return {**layers, "attention": {name: {"kernel": kernel} for name, kernel in kernels.items()}}


def keys_of_parts(key: jax.Array, parts: int) -> jax.Array:
    """The keys with which the holders of the parts of a sequence drop: ``[parts]``."""
    return jax.vmap(partial(jax.random.fold_in, key))(np.arange(parts, dtype=np.int32))


def of_model(case: Case) -> tuple[tuple[tuple[str, int], ...], int]:
    """What an oracle is compiled for: the sizes of its model, and the parts that it drops in."""
    sizes = {name: case.sizes[name] for name in SIZES}
    return tuple(sizes.items()), parts_of(case) if sizes["dropout"] else 1


@lru_cache(maxsize=32)
def loss_and_gradient(sizes: tuple[tuple[str, int], ...], parts: int) -> Callable[..., Any]:
    """``(params, a group's rows, its key) ->`` their mean loss and its gradient, with masks drawn for each part."""
    model = _model_of(sizes)
    in_parts = replace(model, layer=lambda params, x, key: model.layer(params, x, keys_of_parts(key, parts)))

    def loss(params, rows, key):
        return full_loss(in_parts, {**params, "layers": heads_together(params["layers"])}, rows, key)

    return jax.jit(jax.value_and_grad(loss))


# How activations travel, as a block is told: by gathers and scatters, or, in some cases, by sums of everything.
def gather_matmul(x: jax.Array, kernel: jax.Array, axis_name: str) -> jax.Array:
    return lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True) @ kernel


def matmul_scatter(x: jax.Array, kernel: jax.Array, axis_name: str) -> jax.Array:
    return lax.psum_scatter(x @ kernel, axis_name, scatter_dimension=x.ndim - 2, tiled=True)


def gather_matmul_by_sum(x: jax.Array, kernel: jax.Array, axis_name: str) -> jax.Array:
    size, rows = lax.axis_size(axis_name), x.shape[-2]
    each = [jnp.where(lax.axis_index(axis_name) == place, x, 0) for place in range(size)]
    return lax.psum(jnp.concatenate(each, axis=-2), axis_name).reshape(*x.shape[:-2], size * rows, -1) @ kernel


def matmul_scatter_by_sum(x: jax.Array, kernel: jax.Array, axis_name: str) -> jax.Array:
    rows = x.shape[-2] // lax.axis_size(axis_name)
    return lax.dynamic_slice_in_dim(lax.psum(x @ kernel, axis_name), lax.axis_index(axis_name) * rows, rows, -2)


def given(case: Case) -> tuple[Any, Any]:
    """The two functions that a block or a loss is handed."""
    by_sum = gather_matmul_by_sum, matmul_scatter_by_sum
    return by_sum if case.sizes.get("by_sum") else (gather_matmul, matmul_scatter)


def activation_bytes(case: Case) -> int:
    """Of a group's activations between blocks, all parts of the sequences together."""
    return 4 * case.sizes["rows"] * case.sizes["seq"] * case.sizes["width"]


def ring_bytes(case: Case, size: float) -> float:
    """What a device sends to gather or to scatter an array of so many bytes."""
    return (parts_of(case) - 1) / parts_of(case) * size


def is_split(params: Any) -> Any:
    """Whether each leaf is split over the tensor axis."""
    return jax.tree.map(lambda spec: "tensor" in spec, tensor_specs(params, "tensor"))


def held_specs(params: Any, case: Case) -> Any:
    """Of results with a leading dim for what each group holds, and one more for copies of a leaf that is whole."""
    rows, axis = others_of(case) or None, tensor_of(case)
    return jax.tree.map(lambda spec: P(rows, *spec) if axis in spec else P(rows, axis), tensor_specs(params, axis))


def hold(tree: Any) -> Any:
    """A device's part with these dims: see ``held_specs``."""
    return jax.tree.map(lambda leaf, split: leaf[None] if split else leaf[None, None], tree, is_split(tree))


def added_up(e: Evidence, names: set[str]) -> Evidence:
    """With the devices' shares of a gradient added up, for these leaves of ``gradients``."""
    found = {name: a.sum(1, dtype=a.dtype) if name in names else a for name, a in e.measured.items()}
    return replace(e, measured=found)


def shared_leaves(params: Any, prefix: str) -> set[str]:
    """Names of the results for leaves that every device holds whole."""
    leaves = jax.tree.leaves_with_path(is_split(params))
    return {"/".join([prefix, *(str(entry.key) for entry in path)]) for path, split in leaves if not split}

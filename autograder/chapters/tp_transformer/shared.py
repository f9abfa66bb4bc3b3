"""What the judges of ``tp_transformer`` share: oracles' models, bytes of activations, and meshes nobody has seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np

from autograder.chapters.tp_transformer.wrapping import is_split, model_of, parts_of
from autograder.contract.draws import axis_names
from autograder.contract.task import Case, Evidence
from course.model import full_loss

OTHER = "other collectives"
EVERY = ("all_gather", "reduce_scatter", "all_reduce", "collective_permute", "all_to_all")
SIZES = {"width": 16, "hidden": 40, "num_heads": 8, "num_layers": 2, "vocab": 56, "seq": 24, "max_seq": 32, "rows": 2,
         "dropout": 25, "parallel": 0}  # fmt: skip


def unseen(rng: np.random.Generator, meshes: tuple[tuple[int, ...], ...], **more: int) -> Case:
    """A case that learners have not seen, by names and sizes, the axis of features last.

    What an oracle is compiled for has few values, since that takes longer than all the rest.
    """
    mesh = meshes[rng.integers(len(meshes))]
    n = mesh[-1]
    sizes = {"width": 12 * n, "hidden": 7 * n, "num_heads": 2 * n, "vocab": 11 * n, "seq": 2 * n, "max_seq": 3 * n}
    return Case(
        "unseen",
        dict(zip(axis_names(rng, len(mesh)), mesh, strict=True)),
        {**SIZES, **sizes, "num_layers": 1, "rows": 3, "dropout": int(rng.choice([15, 40])), **more},
    )


def heads_together(layers: Any) -> Any:
    """One layer's parameters, or those of stacked layers, as the course's model has them."""
    qkv, out = (layers["attention"][name]["kernel"] for name in ("qkv", "out"))
    *stacked, _, _, width = out.shape
    kernels = {"qkv": qkv.reshape(*stacked, width, -1), "out": out.reshape(*stacked, -1, width)}
    return {**layers, "attention": {name: {"kernel": kernel} for name, kernel in kernels.items()}}


def keys_of_parts(key: jax.Array, parts: int) -> jax.Array:
    """The keys with which the holders of the parts of a sequence drop: ``[parts]``."""
    return jax.vmap(partial(jax.random.fold_in, key))(np.arange(parts, dtype=np.int32))


def model_sizes(case: Case) -> tuple[tuple[str, int], ...]:
    """Those of the case's sizes that its model has."""
    return tuple((name, case.sizes[name]) for name in SIZES)


def of_model(case: Case) -> tuple[tuple[tuple[str, int], ...], int]:
    """What an oracle is compiled for: the sizes of its model, and the parts that it drops in."""
    return model_sizes(case), parts_of(case) if case.sizes["dropout"] else 1


@lru_cache(maxsize=32)
def loss_and_gradient(sizes: tuple[tuple[str, int], ...], parts: int) -> Callable[..., Any]:
    """``(params, a group's rows, its key) ->`` their mean loss and its gradient, with masks drawn for each part."""
    model = model_of(sizes)
    in_parts = replace(model, layer=lambda params, x, key: model.layer(params, x, keys_of_parts(key, parts)))

    def loss(params, rows, key):
        return full_loss(in_parts, {**params, "layers": heads_together(params["layers"])}, rows, key)

    return jax.jit(jax.value_and_grad(loss))


def activation_bytes(case: Case) -> int:
    """Of a group's activations between blocks, all parts of the sequences together."""
    return 4 * case.sizes["rows"] * case.sizes["seq"] * case.sizes["width"]


def ring_bytes(case: Case, size: float) -> float:
    """What a device sends to gather or to scatter an array of so many bytes."""
    return (parts_of(case) - 1) / parts_of(case) * size


def added_up(e: Evidence, names: set[str]) -> Evidence:
    """With the devices' shares of a gradient added up, for these leaves of ``gradients``."""
    found = {name: a.sum(1, dtype=a.dtype) if name in names else a for name, a in e.measured.items()}
    return replace(e, measured=found)


def shared_leaves(params: Any, prefix: str) -> set[str]:
    """Names of the results for leaves that every device holds whole."""
    leaves = jax.tree.leaves_with_path(is_split(params))
    return {"/".join([prefix, *(str(entry.key) for entry in path)]) for path, split in leaves if not split}

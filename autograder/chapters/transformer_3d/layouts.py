"""Code shared by the tasks of ``transformer_3d``: expected layouts, and the model on one device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.chapters.closed_forms import split_spec
from autograder.chapters.draws import compile_oracle, unseen_mesh
from autograder.chapters.transformer_3d.wrapping import (
    Sizes,
    axes_named,
    axes_of,
    in_stages,
    named,
    sizes_of,
    stacked_of,
)
from autograder.contract.byte_facts import resident_bytes
from autograder.contract.case import UNSEEN, ModelSizes
from autograder.contract.case_builders import build_model, encode_specs, join_heads, params_by_head
from autograder.contract.task import Case
from course.layout import tensor_specs
from course.model import Model, full_loss

SIZES = Sizes(width=16, hidden=40, num_heads=8, num_layers=4, vocab=64, seq=8, max_seq=8)


def specs_of(case: Case[Sizes]) -> Any:
    """The ``PartitionSpec`` of each leaf, by the rule in the notebook."""
    data, pipe, tensor = axes_of(case)
    num_data, _, num_tensor = sizes_of(case)

    def spec(path, leaf, split):
        skip = 3 if path[0].key == "layers" else 0
        dims: list[Any] = [None] * len(leaf.shape)
        local = list(leaf.shape[skip:])
        for dim, axis in enumerate(split[1:] if skip else split):
            if axis is not None:
                dims[skip + dim], local[dim] = tensor, local[dim] // num_tensor
        parts = split_spec(tuple(local), num_data, case.sizes.min_size, data)
        if data in parts:
            dim = skip + parts.index(data)
            dims[dim] = (tensor, data) if dims[dim] else data
        if skip:
            dims[1] = pipe
        while dims and dims[-1] is None:
            dims.pop()
        return P(*dims)

    split = tensor_specs(params_by_head(case), tensor)
    return jax.tree.map_with_path(spec, stacked_of(case), split)


def given_specs(case: Case[Sizes]) -> dict[str, Any]:
    """The specs as plain data, for the wrappers that receive them with the case."""
    return encode_specs(specs_of(case))


def unseen(rng: np.random.Generator, *meshes: tuple[int, int, int], **more: Any) -> Case[Sizes]:
    """A case with names and sizes that learners have not seen.

    Sizes that an oracle is compiled for take few values, since compilation takes longer than everything else.
    """
    mesh = unseen_mesh(rng, *meshes)
    (_, stages, n), repeats = mesh.values(), more.get("num_repeats", 1)
    options = {"num_repeats": repeats, "num_layers": stages * repeats, "min_size": int(rng.choice([40, 150]))}
    sizes = {"width": 12 * n, "hidden": 20 * n, "num_heads": 2 * n, "vocab": 24 * n, "seq": 6 * n, "max_seq": 9 * n}
    return Case(UNSEEN, mesh, SIZES.replace(**{**sizes, **options, **more}))


def _parts(spec: P, dim: int, case: Case[Sizes]) -> int:
    return math.prod(case.mesh[axis] for axis in axes_named(spec, dim))


def part_bytes(case: Case[Sizes]) -> list[tuple[int, set[str], bool]]:
    """For every leaf: bytes of a device's part, axes that it is split over, and whether it belongs to the layers."""
    shapes, specs = jax.tree.leaves_with_path(stacked_of(case)), jax.tree.leaves(specs_of(case), is_leaf=_is_spec)
    return [
        (resident_bytes(leaf.shape, spec, case.mesh), named(spec), path[0].key == "layers")
        for (path, leaf), spec in zip(shapes, specs, strict=True)
    ]


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def places_of(case: Case[Sizes]) -> list[dict[str, int]]:
    """Each device's place on every axis, in the mesh's order."""
    return [dict(zip(case.mesh, place, strict=True)) for place in product(*map(range, case.mesh.values()))]


def parts_of_each_device(tree: Any, case: Case[Sizes], specs: Any = None) -> Any:
    """Each device's parts of whole arrays in stages, in the mesh's order: ``[devices, *part]``."""

    def stack_parts(leaf, spec):
        return np.stack([cut(np.asarray(leaf), spec, place, case) for place in places_of(case)])

    return jax.tree.map(stack_parts, tree, specs_of(case) if specs is None else specs)


def cut(leaf: np.ndarray, spec: P, place: dict[str, int], case: Case[Sizes]) -> np.ndarray:
    for dim in range(len(spec)):
        number = 0
        for axis in axes_named(spec, dim):
            number = number * case.mesh[axis] + place[axis]
        length = leaf.shape[dim] // _parts(spec, dim, case)
        leaf = leaf.take(range(number * length, (number + 1) * length), dim)
    return leaf


def model_in_parts(sizes: ModelSizes, parts: int) -> Model:
    """The model on one device; dropout masks are drawn for each part of a sequence, by the key of its device."""
    model = build_model(sizes)

    def keys_of(key):
        return jax.vmap(partial(jax.random.fold_in, key))(np.arange(parts, dtype=np.int32))

    return replace(model, layer=lambda params, x, key: model.layer(params, x, keys_of(key)))


@lru_cache(maxsize=32)
def _one_device_loss(sizes: ModelSizes, count: int, places: int, parts: int) -> Callable[..., jax.Array]:
    """``(whole params, batch, key) ->`` the loss of each place on the data axis, ``[places]``, on one device."""
    in_parts = model_in_parts(sizes, parts)

    def losses(params, batch, key):
        params = {**params, "layers": join_heads(params["layers"])}

        def microbatch_loss(number, rows):
            own = jax.random.fold_in(jax.random.fold_in(key, number // count), number % count)
            return full_loss(in_parts, params, rows, own)

        rows = jax.tree.map(lambda a: a.reshape(places * count, -1, *a.shape[1:]), batch)
        microbatch_losses = jax.vmap(microbatch_loss)(jnp.arange(places * count), rows)
        return microbatch_losses.reshape(places, count).mean(1)

    return losses


def on_one_device(case: Case[Sizes], steps: int = 1) -> Any:
    """Jitted: ``(whole params, batches, key, rate, largest norm) ->`` parameters, losses and gradients of the steps.

    Losses are ``[steps, data]``; gradients are as subtracted, summed over the steps.
    """
    places, parts = (sizes_of(case)[i] for i in (0, 2))
    return _on_one_device(case.sizes.model, case.sizes.num_microbatches, places, parts, steps)


@lru_cache(maxsize=32)
def _on_one_device(sizes: ModelSizes, count: int, places: int, parts: int, steps: int) -> Any:
    losses_of = _one_device_loss(sizes, count, places, parts)

    def run(params, batches, key, rate, largest_norm):
        key = jax.random.wrap_key_data(key)

        def mean_loss(params, batch, key):
            losses = losses_of(params, batch, key)
            return losses.mean(), losses

        def step(carry, numbered):
            params, total = carry
            number, batch = numbered
            own = jax.random.fold_in(key, number)
            gradients, losses = jax.grad(mean_loss, has_aux=True)(params, batch, own)
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients)))
            scaled = jax.tree.map(lambda g: g * jnp.minimum(1, largest_norm / norm), gradients)
            after = jax.tree.map(lambda p, g: p - rate * g, params, scaled)
            return (after, jax.tree.map(jnp.add, total, scaled)), losses

        start = params, jax.tree.map(jnp.zeros_like, params)
        (after, total), losses = lax.scan(step, start, (jnp.arange(steps), batches))
        return after, losses, total

    return compile_oracle(run)


def run_on_one_device(inputs: dict[str, Any], case: Case[Sizes], steps: int = 1) -> tuple[Any, np.ndarray, Any]:
    """Like ``on_one_device``, with ``params`` in stages, as the program receives them; returns each device's parts."""
    whole = {**inputs["params"], "layers": jax.tree.map(_in_a_row, inputs["params"]["layers"])}
    far = np.float32(1e30)
    scalars = inputs.get("learning_rate", np.float32(0)), inputs.get("largest_norm", far)
    results = on_one_device(case, steps)(whole, inputs["batch"], inputs["key"], *scalars)
    after, losses, gradients = jax.tree.map(np.asarray, results)
    return (
        parts_of_each_device(in_stages(after, case), case),
        losses,
        parts_of_each_device(in_stages(gradients, case), case),
    )


def _in_a_row(leaf: np.ndarray) -> np.ndarray:
    return leaf.reshape(-1, *leaf.shape[3:])

"""What the functions of ``transformer_3d`` share: models, who holds what, and the model on one device."""

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

from autograder.contract import Case
from autograder.facts import held_bytes, split_spec
from course.data import token_batch
from course.layout import Options, tensor_specs
from course.model import Model, full_loss, split_heads, transformer

SIZES = {
    "width": 16, "hidden": 40, "num_heads": 8, "num_layers": 4, "vocab": 64, "seq": 8, "max_seq": 8, "rows": 1,
    "num_microbatches": 2, "num_repeats": 2, "min_size": 64, "dropout": 0, "parallel": 0, "rings": 0, "remat": 1,
    "bfloat16": 0,
}  # fmt: skip
# In the order in which the functions are given them, whatever a case calls them.
Axes = tuple[str, str, str]


def axes_of(case: Case) -> Axes:
    """The axes of data, of stages, and of features."""
    data, pipe, tensor = case.mesh
    return data, pipe, tensor


def sizes_of(case: Case) -> tuple[int, int, int]:
    """Their sizes."""
    data, pipe, tensor = (case.mesh[axis] for axis in axes_of(case))
    return data, pipe, tensor


def options_of(case: Case) -> Options:
    """How the case wants the step to be computed."""
    s = case.sizes
    return Options(
        num_microbatches=s["num_microbatches"],
        rings=bool(s["rings"]),
        remat=bool(s["remat"]),
        dtype="bfloat16" if s["bfloat16"] else "float32",
        parallel=bool(s["parallel"]),
        rate=s["dropout"] / 100,
    )


def model_of(case: Case) -> Model:
    """The course's model on one device."""
    return _model_of(tuple(case.sizes.items()))


@lru_cache(maxsize=64)
def _model_of(sizes: tuple[tuple[str, int], ...]) -> Model:
    s = dict(sizes)
    return transformer(width=s["width"], hidden=s["hidden"], num_layers=s["num_layers"], num_heads=s["num_heads"],
                       vocab=s["vocab"], max_seq=s["max_seq"], dropout=s["dropout"] / 100,
                       parallel=bool(s["parallel"]))  # fmt: skip


def whole_of(case: Case) -> Any:
    """Shapes of the whole parameters, heads apart, layers stacked: what ``init_3d`` is given."""
    return _whole_of(tuple(case.sizes.items()))


@lru_cache(maxsize=64)
def _whole_of(sizes: tuple[tuple[str, int], ...]) -> Any:
    def init():
        params = _model_of(sizes).init(jax.random.key(0))
        params["layers"]["attention"] = split_heads(params["layers"]["attention"], dict(sizes)["num_heads"])
        return params

    return jax.eval_shape(init)


def in_stages(tree: Any, case: Case) -> Any:
    """Leaves under ``layers`` as ``[num_repeats, num_stages, layers_per_stage, ...]``; arrays or shapes."""
    grid = case.sizes["num_repeats"], sizes_of(case)[1], -1

    def stack(leaf):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.eval_shape(lambda a: a.reshape(*grid, *a.shape[1:]), leaf)
        return leaf.reshape(*grid, *leaf.shape[1:])

    return {**tree, "layers": jax.tree.map(stack, tree["layers"])}


def stacked_of(case: Case) -> Any:
    """Shapes of the parameters in stages."""
    return in_stages(whole_of(case), case)


def specs_of(case: Case) -> Any:
    """The ``PartitionSpec`` of each of them, by the rule that the notebook states."""
    data, pipe, tensor = axes_of(case)
    num_data, _, num_tensor = sizes_of(case)

    def spec(path, leaf, split):
        skip = 3 if path[0].key == "layers" else 0
        dims: list[Any] = [None] * len(leaf.shape)
        local = list(leaf.shape[skip:])
        for dim, axis in enumerate(split[1:] if skip else split):
            if axis is not None:
                dims[skip + dim], local[dim] = tensor, local[dim] // num_tensor
        parts = split_spec(tuple(local), num_data, case.sizes["min_size"], data)
        if data in parts:
            dim = skip + parts.index(data)
            dims[dim] = (tensor, data) if dims[dim] else data
        if skip:
            dims[1] = pipe
        while dims and dims[-1] is None:
            dims.pop()
        return P(*dims)

    split = tensor_specs(whole_of(case), tensor)
    return jax.tree.map_with_path(spec, stacked_of(case), split)


def part_shapes(case: Case) -> Any:
    """Shapes of one device's parts."""

    def local(leaf, spec):
        dims = [leaf.shape[dim] // _parts(spec, dim, case) for dim in range(len(leaf.shape))]
        return jax.ShapeDtypeStruct(tuple(dims), leaf.dtype)

    return jax.tree.map(local, stacked_of(case), specs_of(case))


def _names(spec: P, dim: int) -> tuple[str, ...]:
    entry = spec[dim] if dim < len(spec) else None
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def _parts(spec: P, dim: int, case: Case) -> int:
    return math.prod(case.mesh[axis] for axis in _names(spec, dim))


def named(spec: P) -> set[str]:
    """The axes that a spec names."""
    return {axis for dim in range(len(spec)) for axis in _names(spec, dim)}


def part_bytes(case: Case) -> list[tuple[int, set[str], bool]]:
    """Of every leaf: bytes of a device's part, axes that it is split over, and whether it is one of the layers'."""
    shapes, specs = jax.tree.leaves_with_path(stacked_of(case)), jax.tree.leaves(specs_of(case), is_leaf=_is_spec)
    return [(held_bytes(leaf.shape, spec, case.mesh), named(spec), path[0].key == "layers")
            for (path, leaf), spec in zip(shapes, specs, strict=True)]  # fmt: skip


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def held_by_each(tree: Any, case: Case) -> Any:
    """What each device holds of whole arrays in stages, in the mesh's order: ``[devices, *part]``."""
    places = [dict(zip(case.mesh, at, strict=True)) for at in product(*map(range, case.mesh.values()))]

    def held(leaf, spec):
        return np.stack([_cut(np.asarray(leaf), spec, place, case) for place in places])

    return jax.tree.map(held, tree, specs_of(case))


def _cut(leaf: np.ndarray, spec: P, place: dict[str, int], case: Case) -> np.ndarray:
    for dim in range(len(spec)):
        number = 0
        for axis in _names(spec, dim):
            number = number * case.mesh[axis] + place[axis]
        length = leaf.shape[dim] // _parts(spec, dim, case)
        leaf = leaf.take(range(number * length, (number + 1) * length), dim)
    return leaf


def rows_of(case: Case) -> int:
    """Sequences in the whole batch."""
    return case.sizes["rows"] * case.sizes["num_microbatches"] * sizes_of(case)[0]


def batch_shapes(case: Case, steps: int | None = None) -> dict[str, Any]:
    """Of one batch, or of a stack of them."""
    shape = (*(() if steps is None else (steps,)), rows_of(case), case.sizes["seq"])
    return {name: jax.ShapeDtypeStruct(shape, np.int32) for name in ("inputs", "targets")}


def draw_batch(rng: np.random.Generator, case: Case) -> dict[str, np.ndarray]:
    s = case.sizes
    return token_batch(int(rng.integers(2**31)), 0, batch=rows_of(case), seq=s["seq"], vocab=s["vocab"])


def heads_together(layers: Any) -> Any:
    """Parameters of stacked layers as the course's model has them."""
    qkv, out = (layers["attention"][name]["kernel"] for name in ("qkv", "out"))
    *stacked, _, _, width = out.shape
    kernels = {"qkv": qkv.reshape(*stacked, width, -1), "out": out.reshape(*stacked, -1, width)}
    return {**layers, "attention": {name: {"kernel": kernel} for name, kernel in kernels.items()}}


def one_device_loss(case: Case) -> Callable[[Any, Any, jax.Array], jax.Array]:
    """``(whole params, batch, key) ->`` the loss of each place on the data axis, ``[data]``, on one device.

    Masks of dropout are drawn for each part of a sequence, with the keys of those who hold it.
    """
    return _one_device_loss(tuple(case.sizes.items()), *(sizes_of(case)[i] for i in (0, 2)))


@lru_cache(maxsize=32)
def _one_device_loss(sizes: tuple[tuple[str, int], ...], places: int, parts: int) -> Callable[..., jax.Array]:
    model, s = _model_of(sizes), dict(sizes)
    count = s["num_microbatches"]

    def keys_of(key):
        return jax.vmap(partial(jax.random.fold_in, key))(np.arange(parts, dtype=np.int32))

    in_parts = replace(model, layer=lambda params, x, key: model.layer(params, x, keys_of(key)))

    def losses(params, batch, key):
        params = {**params, "layers": heads_together(params["layers"])}

        def one(number, rows):
            own = jax.random.fold_in(jax.random.fold_in(key, number // count), number % count)
            return full_loss(in_parts, params, rows, own)

        rows = jax.tree.map(lambda a: a.reshape(places * count, -1, *a.shape[1:]), batch)
        every = jax.vmap(one)(jnp.arange(places * count), rows)
        return every.reshape(places, count).mean(1)

    return losses


def on_one_device(case: Case, steps: int = 1) -> Any:
    """Jitted: ``(whole params, batches, key, rate, largest norm) ->`` parameters, losses and gradients of the steps.

    Losses are ``[steps, data]``; the gradients are those of what was subtracted, summed over the steps.
    """
    return _on_one_device(tuple(case.sizes.items()), *(sizes_of(case)[i] for i in (0, 2)), steps)


@lru_cache(maxsize=32)
def _on_one_device(sizes: tuple[tuple[str, int], ...], places: int, parts: int, steps: int) -> Any:
    losses_of = _one_device_loss(sizes, places, parts)

    def run(params, batches, key, rate, largest_norm):
        key = jax.random.wrap_key_data(key)

        def mean_loss(params, batch, key):
            losses = losses_of(params, batch, key)
            return losses.mean(), losses

        def step(carry, given):
            params, total = carry
            number, batch = given
            own = jax.random.fold_in(key, number)
            gradients, losses = jax.grad(mean_loss, has_aux=True)(params, batch, own)
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients)))
            scaled = jax.tree.map(lambda g: g * jnp.minimum(1, largest_norm / norm), gradients)
            after = jax.tree.map(lambda p, g: p - rate * g, params, scaled)
            return (after, jax.tree.map(jnp.add, total, scaled)), losses

        start = params, jax.tree.map(jnp.zeros_like, params)
        (after, total), losses = lax.scan(step, start, (jnp.arange(steps), batches))
        return after, losses, total

    return jax.jit(run)


def run_on_one_device(inputs: dict[str, Any], case: Case, steps: int = 1) -> tuple[Any, np.ndarray, Any]:
    """The same with ``params`` in stages, as the program is given them; and results that each device holds."""
    whole = {**inputs["params"], "layers": jax.tree.map(_in_a_row, inputs["params"]["layers"])}
    far = np.float32(1e30)
    found = on_one_device(case, steps)(whole, inputs["batch"], inputs["key"], inputs.get("learning_rate", far * 0),
                                       inputs.get("largest_norm", far))  # fmt: skip
    after, losses, gradients = jax.tree.map(np.asarray, found)
    return held_by_each(in_stages(after, case), case), losses, held_by_each(in_stages(gradients, case), case)


def _in_a_row(leaf: np.ndarray) -> np.ndarray:
    return leaf.reshape(-1, *leaf.shape[3:])

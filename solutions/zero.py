# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # ZeRO: a sharded optimizer
#
# In data parallelism every device makes the same update with its own copy of the optimizer's state. With Adam in
# float32 that state is 8 of the 16 bytes that a parameter takes, and with `n` devices it exists `n` times. FSDP splits
# everything, and sends half as much again. ZeRO's first two stages split less, and the first of them sends no
# more than data parallelism does:
#
# | | split | bytes a parameter on each device |
# |---|---|---|
# | data parallelism | nothing | 4 + 4 + 8 |
# | ZeRO-1 | Adam's moments | 4 + 4 + 8/n |
# | ZeRO-2 | gradients as well | 4 + 4/n + 8/n |
# | ZeRO-3, FSDP | parameters as well | 4/n + 4/n + 8/n |
#
# You will write both in five functions:
#
# | function | runs when | what it does |
# |---|---|---|
# | `shard_optimizer_state` | once, at the start | makes Adam's moments for this device's part of each leaf |
# | `global_norm` | every step | the norm of a gradient that is spread over devices |
# | `sharded_adamw` | every step | clips, updates this device's part, and gathers the parameters |
# | `zero1_step` | every step | a training step with sharded moments |
# | `zero2_step` | every step | the same with microbatches, and with sharded gradients between them |

# %%
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from course.data import token_batch
from course.mesh import as_varying, make_mesh, shard_map_with_specs
from course.model import Model, full_loss, transformer
from course.train import AdamW, make_train_step
from solutions.fsdp import shard_params

PyTree = Any

# %% [markdown]
# ## Once: `shard_optimizer_state`


# %%
def shard_optimizer_state(params: PyTree, axis_name: str | tuple[str, ...], min_size: int) -> tuple[PyTree, PyTree]:
    """Adam's moments of this device's part of each leaf. Runs inside ``shard_map``.

    Args:
        params: Whole parameters, the same on every device.
        axis_name: The mesh axis to split over, or several of them.
        min_size: Leaves with fewer elements stay whole.

    Returns:
        ``(state, specs)``. The state is ``{"m": tree, "v": tree, "count": scalar}``: two trees like ``params`` with the
        local part ``[..., dim/axis, ...]`` of each leaf, all zeros, and the number of updates made, an ``int32``. The
        specs are one tree like ``params`` with the ``PartitionSpec`` of each part.
    """
    ### BEGIN SOLUTION
    parts, specs = shard_params(params, axis_name, min_size)
    moments = {name: jax.tree.map(jnp.zeros_like, parts) for name in ("m", "v")}
    return {**moments, "count": jnp.zeros((), jnp.int32)}, specs
    ### END SOLUTION


# %% [markdown]
# ## Once a step: `global_norm`


# %%
def global_norm(tree: PyTree, specs: PyTree) -> jax.Array:
    """The Euclidean norm of all leaves together, each element counted once. Runs inside ``shard_map``.

    Args:
        tree: Local parts, ``[..., dim/axis, ...]``, each varying over the axes that its spec names and over no other.
        specs: The ``PartitionSpec`` of each leaf.

    Returns:
        A scalar, the same on every device.
    """
    ### BEGIN SOLUTION
    squares = {}
    for leaf, spec in zip(jax.tree.leaves(tree), jax.tree.leaves(specs), strict=True):
        axes = tuple(sorted(jax.tree.leaves(tuple(spec))))  # also looks into tuples of names, and leaves None out
        squares[axes] = squares.get(axes, 0.0) + jnp.sum(leaf**2)
    return jnp.sqrt(sum(lax.psum(total, axes) if axes else total for axes, total in squares.items()))
    ### END SOLUTION


# %% [markdown]
# ## The update: `sharded_adamw`


# %%
def sharded_adamw(
    params: PyTree,
    gradients: PyTree,
    state: PyTree,
    specs: PyTree,
    axis_name: str | tuple[str, ...],
    config: AdamW,
) -> tuple[PyTree, PyTree, jax.Array]:
    """Clip by the global norm, update this device's part with AdamW, gather. Runs inside ``shard_map``.

    Args:
        params: Whole parameters, the same on every device; leaves under ``layers`` are ``[num_layers, ...]``.
        gradients: This device's parts of the mean gradient, ``[..., dim/axis, ...]``.
        state: As from ``shard_optimizer_state``.
        specs: The ``PartitionSpec`` of each part.
        axis_name: The mesh axis that the state is split over, or several of them.
        config: Settings of AdamW.

    Returns:
        ``(params, state, norm)``: the updated parameters, whole, the updated state, and the global norm of the gradient
        before it was clipped.
    """
    ### BEGIN SOLUTION
    norm, count = global_norm(gradients, specs), state["count"] + 1
    time, keep = count.astype(jnp.float32), jnp.minimum(1, config.clip / norm)

    def update(leaf, gradient, m, v, spec, decay):
        dim = spec.index(axis_name) if axis_name in spec else None
        part = leaf
        if dim is not None:
            part = lax.dynamic_slice_in_dim(leaf, lax.axis_index(axis_name) * m.shape[dim], m.shape[dim], dim)
        m = config.beta1 * m + (1 - config.beta1) * keep * gradient
        v = config.beta2 * v + (1 - config.beta2) * (keep * gradient) ** 2
        mean, square = m / (1 - config.beta1**time), v / (1 - config.beta2**time)
        part -= config.learning_rate * (mean / (jnp.sqrt(square) + config.eps) + decay * part)
        return part if dim is None else lax.all_gather(part, axis_name, axis=dim, tiled=True), m, v

    def decay(path, leaf):
        own_dims = leaf.ndim - (path[0].key == "layers")
        return config.weight_decay if own_dims >= 2 else 0.0

    decays = jax.tree.map_with_path(decay, params)
    updated = jax.tree.map(update, params, gradients, state["m"], state["v"], specs, decays)
    params, m, v = jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0, 0)), updated)
    return params, {"m": m, "v": v, "count": count}, norm
    ### END SOLUTION


# %% [markdown]
# ## Stage 1: `zero1_step`


# %%
def zero1_step(
    params: PyTree,
    state: PyTree,
    specs: PyTree,
    batch: dict[str, jax.Array],
    model: Model,
    axis_name: str | tuple[str, ...],
    config: AdamW,
) -> tuple[PyTree, PyTree, jax.Array, jax.Array]:
    """One step of AdamW with sharded moments. Runs inside ``shard_map``.

    Args:
        params: Whole parameters, all varying over ``axis_name``; leaves under ``layers`` are ``[num_layers, ...]``.
        state: As from ``shard_optimizer_state``.
        specs: The ``PartitionSpec`` of each part; the dim that stacks layers is never split.
        batch: This device's rows, ``inputs`` and ``targets``, ``[batch/axis, ...]``.
        model: The model's pure functions.
        axis_name: The mesh axis that batch and state are split over, or several of them.
        config: Settings of AdamW.

    Returns:
        ``(params, state, loss, norm)``: updated parameters and state, the mean loss over the rows of all devices, and
        the global norm of its gradient.
    """

    ### BEGIN SOLUTION
    def mean(gradient, spec):
        if axis_name not in spec:
            return lax.pmean(gradient, axis_name)
        total = lax.psum_scatter(gradient, axis_name, scatter_dimension=spec.index(axis_name), tiled=True)
        return total / lax.axis_size(axis_name)

    loss, gradients = jax.value_and_grad(lambda params: full_loss(model, params, batch))(params)
    gradients = jax.tree.map(mean, gradients, specs)
    params, state, norm = sharded_adamw(params, gradients, state, specs, axis_name, config)
    return params, state, lax.pmean(loss, axis_name), norm
    ### END SOLUTION


# %% [markdown]
# ## Stage 2: `zero2_step`


# %%
def zero2_step(
    params: PyTree,
    state: PyTree,
    specs: PyTree,
    batch: dict[str, jax.Array],
    model: Model,
    axis_name: str | tuple[str, ...],
    num_microbatches: int,
    config: AdamW,
) -> tuple[PyTree, PyTree, jax.Array, jax.Array]:
    """One step of AdamW over microbatches, moments and gradients sharded. Runs inside ``shard_map``.

    Args:
        params: Whole parameters, all varying over ``axis_name``; leaves under ``layers`` are ``[num_layers, ...]``.
        state: As from ``shard_optimizer_state``.
        specs: The ``PartitionSpec`` of each part; under ``layers`` its first entry belongs to the layer dim.
        batch: This device's rows, ``inputs`` and ``targets``, ``[batch/axis, ...]``.
        model: The model's pure functions.
        axis_name: The mesh axis that batch and state are split over, or several of them.
        num_microbatches: How many parts a device's rows are taken in; divides their number.
        config: Settings of AdamW.

    Returns:
        ``(params, state, loss, norm)``: updated parameters and state, the mean loss over the rows of all devices, and
        the global norm of its gradient.
    """

    ### BEGIN SOLUTION
    def part_of(gradient, spec):
        if axis_name not in spec:
            return gradient
        total = lax.psum_scatter(gradient, axis_name, scatter_dimension=spec.index(axis_name), tiled=True)
        return total / lax.axis_size(axis_name)

    layer_specs = jax.tree.map(lambda spec: P(*spec[1:]), specs["layers"])

    def add(carry, rows):
        loss, total = carry
        x, embed_backward = jax.vjp(lambda p: model.embed(p, rows["inputs"]), params["embed"])
        x, inputs = lax.scan(lambda x, layer: (model.layer(layer, x), x), x, params["layers"])
        more, (head, dx) = jax.value_and_grad(model.loss, argnums=(0, 1))(params["head"], x, rows["targets"])

        def backward(carry, at):
            dx, total = carry
            number, layer, x = at
            gradients, dx = jax.vjp(model.layer, layer, x)[1](dx)
            parts = jax.tree.map(part_of, gradients, layer_specs)
            return (dx, jax.tree.map(lambda t, g: t.at[number].add(g), total, parts)), None

        layers = jnp.arange(model.num_layers), params["layers"], inputs
        (dx, of_layers), _ = lax.scan(backward, (dx, total["layers"]), layers, reverse=True)
        ends = {"embed": embed_backward(dx)[0], "head": head}
        of_ends = {end: jax.tree.map(lambda t, g, s: t + part_of(g, s), total[end], ends[end], specs[end]) for end in ends}
        return (loss + more, {**of_ends, "layers": of_layers}), None

    nothing = lax.pcast(jnp.zeros(()), axis_name, to="varying"), jax.tree.map(jnp.zeros_like, state["m"])
    microbatches = jax.tree.map(lambda rows: rows.reshape(num_microbatches, -1, *rows.shape[1:]), batch)
    loss, gradients = jax.tree.map(lambda x: x / num_microbatches, lax.scan(add, nothing, microbatches)[0])
    gradients = jax.tree.map(lambda g, s: g if axis_name in s else lax.pmean(g, axis_name), gradients, specs)
    params, state, norm = sharded_adamw(params, gradients, state, specs, axis_name, config)
    return params, state, lax.pmean(loss, axis_name), norm
    ### END SOLUTION


# %% [markdown]
# ## In your own words
#
# TODO

# %% [markdown]
# ### BEGIN SOLUTION
# TODO
# ### END SOLUTION

# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Fully sharded data parallelism
#
# Data parallelism keeps a whole copy of the parameters, the gradients and the optimizer's state on every
# device, and all copies are equal. With `n` devices, `n - 1` of every `n` bytes are a repetition. Fully
# sharded data parallelism (FSDP, also called ZeRO-3) keeps one copy *in all*: each device holds a part of
# every large array, and the whole array exists only for the short while in which a layer computes with it.
#
# You will write it in three functions:
#
# | function | runs when | what it does |
# |---|---|---|
# | `shard_params` | once, at the start | keeps this device's part of each large array |
# | `gather_params` | whenever parameters are used | joins the parts; backward, averages and splits the gradient |
# | `fsdp_loss` | every step | gathers one layer at a time, and never keeps what it gathered |
#
# The theory is on the course's page `fsdp`: `make serve` shows it, and `site/pages/fsdp.md` is its source. Run the next
# cell first: it gives this notebook 8 emulated devices.

# %%
from typing import Any

import jax
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from course.data import regression_batch
from course.mesh import make_mesh, shard_map_with_specs
from course.model import Model, mlp
from course.train import make_train_step

PyTree = Any

# %% [markdown]
# ## Keep a part: `shard_params`
#
# `shard_params` runs inside `jax.shard_map`. Every device enters with the same whole `params` and leaves with
# its own part of them. The rule, for each leaf on its own:
#
# - A leaf with fewer than `min_size` elements stays whole: gathering it would cost more than it saves.
# - Otherwise split the **largest dim that is divisible** by the size of the axis; of equally large ones the
#   first. A leaf with no divisible dim stays whole. There is no padding.
#
# Next to the parts, return the `PartitionSpec` of each leaf: `P(None, "data")` says that dim 1 is split over
# `data`, `P()` that the leaf is whole.
#
# | budget | |
# |---|---|
# | bytes held per device | exactly those of the rule |
# | communication | none: each device already has everything, and cuts out its own part |
#
# Useful: `lax.axis_size`, `lax.axis_index`, `lax.dynamic_slice_in_dim`. The mesh's axis need not be called `data`.


# %%
def shard_params(params: PyTree, axis_name: str, min_size: int) -> tuple[PyTree, PyTree]:
    """Keep this device's part of each large leaf. Runs inside ``shard_map``.

    Args:
        params: Whole parameters, the same on every device.
        axis_name: The mesh axis to split over.
        min_size: Leaves with fewer elements stay whole.

    Returns:
        ``(shards, specs)``, two trees like ``params``: the local part of each leaf, ``[..., dim/axis, ...]``,
        and its ``PartitionSpec``, ``P()`` for a leaf that stays whole.
    """
    ### BEGIN SOLUTION
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)

    def split(leaf):
        divisible = [dim for dim in range(leaf.ndim) if leaf.shape[dim] % size == 0]
        if leaf.size < min_size or not divisible:
            return leaf, P()
        dim = max(divisible, key=lambda d: leaf.shape[d])
        length = leaf.shape[dim] // size
        return lax.dynamic_slice_in_dim(leaf, index * length, length, dim), P(*[None] * dim, axis_name)

    leaves, tree = jax.tree.flatten(params)
    shards, specs = zip(*map(split, leaves), strict=True)
    return tree.unflatten(shards), tree.unflatten(specs)
    ### END SOLUTION


# %% [markdown]
# ## Use it: `gather_params`
#
# The forward pass needs whole arrays. `gather_params` puts the parts of each sharded leaf together with one
# all-gather. A leaf whose spec is `P()` passes through untouched.
#
# On the way back the opposite happens. Every device has computed the gradient of **its own** loss, the mean
# over its own rows of the batch, with respect to the whole array. What each device should keep is its part of
# the **mean** of these gradients over the axis: one reduce-scatter. JAX's own transpose of an all-gather is a
# reduce-scatter that *sums*; the mean is up to you.
#
# The gradient of a leaf that stayed whole is left as it is: averaging those is one all-reduce per step, which
# the training step does, not this function.
#
# | budget | forward | backward |
# |---|---|---|
# | per sharded leaf | one all-gather | one reduce-scatter |
# | bytes sent per device | (n-1)/n of the leaf | (n-1)/n of the leaf |
# | all-reduce | none | none |
#
# Values and gradients must equal one device's up to rounding: 2e-5 of the leaf's largest element.
#
# A spec works like a tuple: `axis_name in spec`, `spec.index(axis_name)`. In JAX's messages, `float32[3,2,8]{V:data}`
# is an array that varies over `data`: each device may hold another value. The result of an all-gather is typed so too.
#
# Useful: `lax.all_gather(..., tiled=True)`, `lax.psum_scatter(..., tiled=True)`, `jax.custom_vjp`.


# %%
def gather_params(shards: PyTree, specs: PyTree, axis_name: str) -> PyTree:
    """Whole parameters from their parts; gradients come back as means, in parts. Runs inside ``shard_map``.

    Args:
        shards: Local parts, ``[..., dim/axis, ...]``; every leaf varies over ``axis_name``.
        specs: The ``PartitionSpec`` of each leaf.
        axis_name: The mesh axis that leaves are split over.

    Returns:
        A tree like ``shards`` with whole leaves. Its transpose takes each device's gradient of the whole leaf to
        this device's part of the mean over ``axis_name``.
    """

    ### BEGIN SOLUTION
    def gather(shard, spec):
        if axis_name not in spec:
            return shard
        dim = spec.index(axis_name)

        @jax.custom_vjp
        def whole(shard):
            return lax.all_gather(shard, axis_name, axis=dim, tiled=True)

        def backward(_, gradient):
            total = lax.psum_scatter(gradient, axis_name, scatter_dimension=dim, tiled=True)
            return (total / lax.axis_size(axis_name),)

        whole.defvjp(lambda shard: (whole(shard), None), backward)
        return whole(shard)

    return jax.tree.map(gather, shards, specs)
    ### END SOLUTION


# %% [markdown]
# ## One layer at a time: `fsdp_loss`
#
# Gathering the whole model at once would need as much memory as not sharding it. So gather one layer, compute
# with it, let it go, and gather the next.
#
# There is a trap. For the backward pass JAX saves what the forward pass computed, and the gathered weights are
# among it: by the end of the forward pass all layers' weights lie on every device after all. Make the backward
# pass gather each layer **again**, and recompute the layer's activations while it is at it.
#
# `model` has three pure functions: `model.embed(params["embed"], inputs)`, `model.layer(layer_params, x)` for
# one layer, and `model.loss(params["head"], x, targets)`, the mean over the rows it is given. The leaves under
# `layers` are stacked: their leading dim is the layer, and it is never split, so one layer's spec is the
# stacked leaf's without its first entry. Use `gather_params`, your own from above: get it right first, since its
# gradient is part of this one's. Each device returns the loss of its own rows; averaging is not this function's task.
#
# | budget | |
# |---|---|
# | temporaries that live at once | at most 1.15 times the reference's |
# | predicted time of a step on 8 H100 | at most 1.15 times the reference's |
# | all-gather | at most twice per sharded leaf (forward and backward) |
# | reduce-scatter | once per sharded leaf, in the backward pass |
# | any other collective | none |
#
# Useful: `lax.scan` over the stacked layers, `jax.checkpoint`.


# %%
def fsdp_loss(shards: PyTree, specs: PyTree, batch: dict[str, jax.Array], model: Model, axis_name: str) -> jax.Array:
    """The loss of this device's rows, gathering each layer when it is needed. Runs inside ``shard_map``.

    Args:
        shards: Local parts of the parameters; leaves under ``layers`` are ``[num_layers, ...]``.
        specs: The ``PartitionSpec`` of each leaf; under ``layers`` its first entry belongs to the layer dim.
        batch: This device's rows, ``inputs`` and ``targets``, ``[batch/axis, ...]``.
        model: The model's pure functions.
        axis_name: The mesh axis that parameters and batch are split over.

    Returns:
        The mean loss over this device's rows, a scalar that varies over ``axis_name``.
    """
    ### BEGIN SOLUTION
    layer_specs = jax.tree.map(lambda spec: P(*spec[1:]), specs["layers"])

    @jax.checkpoint
    def embed(part, inputs):
        return model.embed(gather_params(part, specs["embed"], axis_name), inputs)

    @jax.checkpoint
    def layer(x, part):
        return model.layer(gather_params(part, layer_specs, axis_name), x), None

    @jax.checkpoint
    def head(part, x, targets):
        return model.loss(gather_params(part, specs["head"], axis_name), x, targets)

    x = embed(shards["embed"], batch["inputs"])
    x, _ = lax.scan(layer, x, shards["layers"])
    return head(shards["head"], x, batch["targets"])
    ### END SOLUTION


# %% [markdown]
# ## In your own words
#
# A colleague proposes to leave out the second gather: "The weights were just here, why send them again?"
# For a model of `L` equal layers with `W` bytes each on `n` devices, say what keeping them would cost in memory
# and save in communication, and when you would agree. A few sentences and two formulas are enough.

# %% [markdown]
# ### BEGIN SOLUTION
# Keeping the gathered weights costs about `L * W` bytes on each device at the end of the forward pass, against
# `W` (one layer at a time): sharding no longer helps, as far as the peak is concerned. It saves one of two
# all-gathers, `L * W * (n - 1) / n` bytes of the `3 * L * W * (n - 1) / n` that a step sends (two gathers and a
# reduce-scatter), so a third of the communication. It is worth it where memory is left over and the network
# is what the step waits for; sharding only gradients and optimizer state (ZeRO-2) is that choice made for good.
# ### END SOLUTION

# %% [markdown]
# ## Lab: who holds what
#
# Everything together on 8 emulated devices: shard a model, look at what each device holds, and train it for a
# few steps with plain SGD. The last column is the loss of the same model on one device.

# %%
if __name__ == "__main__":
    mesh = make_mesh({"data": 8})
    model = mlp(width=64, hidden=256, num_layers=4, num_inputs=16, num_outputs=8)
    params = model.init(jax.random.key(0))

    split = shard_map_with_specs(lambda p: shard_params(p, "data", 1024), mesh, in_specs=(P(),))
    shards, specs = split(params)

    for path, shard in jax.tree.leaves_with_path(shards):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        print(f"{name:24} {shard.shape!s:16} on each device {shard.addressable_shards[0].data.shape}")
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(shards))
    print(f"whole model {whole:,} bytes, on each device {held:,} bytes: {held / whole:.3f} of it")

# %%
if __name__ == "__main__":

    def sgd_step(shards, batch):
        # Whole leaves enter as varying, so that their gradients stay each device's own until we average them.
        varying = jax.tree.map(lambda s, p: s if "data" in p else lax.pcast(s, "data", to="varying"), shards, specs)
        loss, gradients = jax.value_and_grad(fsdp_loss)(varying, specs, batch, model, "data")
        gradients = jax.tree.map(lambda g, p: g if "data" in p else lax.pmean(g, "data"), gradients, specs)
        return jax.tree.map(lambda s, g: s - 0.02 * g, shards, gradients), lax.pmean(loss, "data")

    step = jax.jit(jax.shard_map(sgd_step, mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P())))
    plain_step = make_train_step(model, optax.sgd(0.02))
    plain, plain_state = params, optax.sgd(0.02).init(params)

    for i in range(6):
        batch = regression_batch(0, i, batch=64, num_inputs=16, num_outputs=8)
        shards, loss = step(shards, batch)
        plain, plain_state, plain_loss = plain_step(plain, plain_state, batch)
        print(f"step {i}   8 devices {loss:.5f}   one device {plain_loss:.5f}")

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
# Data parallelism keeps a full copy of the parameters, the gradients and the optimizer state on every device. With `n`
# devices, `n - 1` of every `n` bytes are redundant. Fully sharded data parallelism (FSDP, also called ZeRO-3) keeps one
# copy *in total*: each device holds a shard of every large array, and the whole array exists only briefly, while a
# layer computes with it.
#
# You will write it in five functions:
# | function | when it runs | what it does |
# |---|---|---|
# | `shard_params` | once, at the start | keeps this device's part of each large array |
# | `gather_params` | whenever parameters are used | joins the parts; the backward pass averages and splits gradients |
# | `fsdp_loss` | every step | gathers one layer at a time, and never keeps the gathered weights |
# | `fsdp_train_step` | every step | the whole step; prefetches the next layer's weights |
# | `hybrid_shard_step` | every step, on several nodes | shards within a node, and keeps a copy on each node |

# %%
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from course.data import token_batch
from course.machines import machine
from course.mesh import abstract_mesh, as_varying, make_mesh, shard_map_with_specs
from course.model import Model, mlp, transformer
from course.predict import predict
from course.program import export
from course.train import make_train_step

PyTree = Any

# %% [markdown]
# ## Keep a part: `shard_params`
#
# `shard_params` runs inside `jax.shard_map`. Every device starts with the same whole `params` and ends with its own
# part of them. This is the rule for each leaf:
#
# - A leaf with fewer than `min_size` elements stays whole: gathering it would cost more than it saves.
# - Otherwise split the **largest dim that is divisible** by the size of the axis; if there are several, the first. A
#   leaf with no divisible dim stays whole. There is no padding.
#
# Along with the parts, return the `PartitionSpec` of each leaf: `P(None, "data")` says that dim 1 is split over `data`,
# `P()` that the leaf is whole.
#
# | budget | |
# |---|---|
# | bytes held per device | exactly those the rule gives |
# | communication | none: each device already has everything, and slices out its own part |
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
# The forward pass needs whole arrays. `gather_params` assembles the parts of each sharded leaf with one all-gather. A
# leaf whose spec is `P()` passes through unchanged.
#
# The backward pass does the opposite. Every device has computed the gradient of **its own** loss, the mean over its own
# rows of the batch, with respect to the whole array. Each device should keep its part of the **mean** of these
# gradients over the axis: one reduce-scatter. JAX's own transpose of an all-gather is a reduce-scatter that *sums*; the
# mean is up to you.
#
# Do not change the gradient of a leaf that stayed whole: averaging it takes one all-reduce per step, which is the
# training step's job.
#
# | budget | forward | backward |
# |---|---|---|
# | per sharded leaf | one all-gather | one reduce-scatter |
# | bytes sent per device | (n-1)/n of the leaf | (n-1)/n of the leaf |
# | all-reduce | none | none |
#
# Values and gradients must equal those of a single device up to rounding: 2e-5 of the leaf's largest element.
#
# A spec works like a tuple: `axis_name in spec`, `spec.index(axis_name)`. In JAX's messages, `float32[3,2,8]{V:data}`
# is an array that varies over `data`: each device may hold a different value. By default the result of an all-gather
# also has such a type.
#
# Useful: `lax.all_gather(..., tiled=True)`, `lax.psum_scatter(..., tiled=True)`, and `jax.custom_vjp`, which gives a
# function a backward pass of your own. The forward rule returns the result and what the backward rule will need. The
# backward rule takes that and the gradient of the result, and returns a tuple: one gradient per argument. This
# function changes nothing on the way forward, and makes gradients ten times smaller on the way back:


# %%
if __name__ == "__main__":

    @jax.custom_vjp
    def cautious(x):
        return x

    cautious.defvjp(lambda x: (x, None), lambda _, gradient: (gradient / 10,))
    print("the derivative of 3 * x:", jax.grad(lambda x: 3 * x)(1.0))
    print("the derivative of 3 * cautious(x):", jax.grad(lambda x: 3 * cautious(x))(1.0))


# %%
def gather_params(shards: PyTree, specs: PyTree, axis_name: str) -> PyTree:
    """Gather whole parameters; the backward pass averages and splits their gradients. Runs inside ``shard_map``.

    Args:
        shards: Local parts, ``[..., dim/axis, ...]``; every leaf varies over ``axis_name``.
        specs: The ``PartitionSpec`` of each leaf.
        axis_name: The mesh axis that leaves are split over.

    Returns:
        A tree like ``shards`` with whole leaves. Its transpose maps the devices' gradients of a whole leaf to this
        device's part of their mean over ``axis_name``.
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
# Gathering the whole model at once would need as much memory as not sharding it. So gather one layer, compute with it,
# free it, and gather the next.
#
# There is a trap. For the backward pass, JAX saves intermediate results of the forward pass, including the gathered
# weights: by the end of the forward pass, all layers' weights are on every device after all. Make the backward pass
# gather each layer **again**, and recompute the layer's activations along the way.
#
# `model` has three pure functions: `model.embed(params["embed"], inputs)`, `model.layer(layer_params, x)` for one
# layer, and `model.loss(params["head"], x, targets)`, the mean over its rows. The leaves under `layers` are stacked:
# their leading dim is the layer, and it is never split, so one layer's spec is the stacked leaf's without its first
# entry. Use `gather_params`, your own from above: get it right first, since this function's gradient depends on it.
# Each device returns the loss of its own rows; averaging is not this function's job.
#
# | budget | |
# |---|---|
# | live temporaries | at most 1.25 times the reference's |
# | predicted step time on 8 H100s | at most 1.15 times the reference's |
# | all-gather | at most twice per sharded leaf (forward and backward) |
# | reduce-scatter | once per sharded leaf, in the backward pass |
# | any other collective | none |
#
# Useful: `lax.scan` over the stacked layers, `jax.checkpoint`.


# %%
def fsdp_loss(shards: PyTree, specs: PyTree, batch: dict[str, jax.Array], model: Model, axis_name: str) -> jax.Array:
    """Compute the loss of this device's rows, gathering each layer when needed. Runs inside ``shard_map``.

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
# ## While this layer computes: `fsdp_train_step`
#
# `fsdp_loss` gathers a layer, waits, computes, and gathers the next. A device can compute and communicate at the same
# time, but in that loop it alternates. Here is how long each takes for one layer of the size that you are graded on:

# %%
if __name__ == "__main__":
    h100, devices, tokens, weights = machine("8xH100"), 8, 1792, 2 * 4096 * 16384
    forward = 2 * tokens * weights / h100.peak("f32")
    sending = 4 * weights * (devices - 1) / devices / h100.bandwidth_of(tuple(range(devices)))
    for what, compute, collectives in (("forward pass", 1, 1), ("backward pass, with recomputation", 3, 2)):
        in_turn, concurrent = compute * forward + collectives * sending, max(compute * forward, collectives * sending)
        print(
            f"{what}: {1e3 * compute * forward:.2f} ms of matmuls, {1e3 * collectives * sending:.2f} ms of transfers;"
        )
        print(f"    one after the other {1e3 * in_turn:.2f} ms, concurrently {1e3 * concurrent:.2f} ms")

# %% [markdown]
# Operations can only run concurrently if neither depends on the other. The gather of the *next* layer does not depend
# on this layer's computation. Inside one iteration of a `lax.scan`, a transfer can overlap with computation; between
# iterations nothing is in flight. So each iteration must have the whole weights that it computes with in its carry from
# the start, and gather those for the next iteration. A transfer starts as soon as its operand is ready, wherever in the
# iteration it is written.
#
# For the forward pass, that is all. You must write the backward pass yourself: JAX's derivative of a scan saves the
# carry of every iteration, which now contains a whole layer. `jax.checkpoint` does not help, since it saves the inputs
# of an iteration. Write the backward pass as your own scan, in reverse, over each layer's *input* and the *parts* of
# its weights. Its iteration for layer `i` gathers layer `i - 1`, recomputes layer `i`'s forward pass, runs its backward
# pass, and reduce-scatters each of its gradients as soon as it is ready.
#
# This function is the whole step. It takes the parts and returns the parts updated by plain SGD
# (`part - learning_rate * gradient`) and the loss:
#
# - On entry, every leaf of `shards` varies over `axis_name`, including those that stay whole: their gradients are each
#   device's own until you average them, once per leaf and step.
# - The batch has a `mask`, as in the chapter `data_parallel`: 1 for a row or token that counts, and 0 for padding. The
#   returned loss is the mean over **all unmasked rows or tokens on all devices**, the same on every device. Devices
#   hold different numbers of them, some none at all. `model.loss(params["head"], x, targets, mask)` is the mean over
#   those of one device, and 0 if it has none.
# - The gradient of a sharded leaf is a mean over devices, like `gather_params`'s, in which all devices have the same
#   weight. Divide after the reduce-scatter, not before: otherwise the transfer waits for the division of an array that
#   is `n` times as large.
# - `model` and `specs` are as in `fsdp_loss`.
#
# | budget | |
# |---|---|
# | predicted step time on 8 H100s | at most 1.18 times the reference's |
# | live temporaries | at most 1.2 times the reference's |
# | all-gather | at most twice per sharded leaf |
# | reduce-scatter | once per sharded leaf |
# | all-reduce | once per leaf that stays whole, once for the loss, once for the unmasked count |
# | any other collective | none |
#
# Parameters after one step and after three must equal those of a single device. `check` also recovers your gradient,
# leaf by leaf, as the update divided by `learning_rate`, and compares it.
#
# Useful: `lax.scan(..., reverse=True)`, `jax.vjp(model.layer, weights, x)`, `jax.custom_vjp` (or none: a step is not
# differentiated), `lax.psum_scatter`, `lax.pmean`. The first and the last layer have only one neighbour, and may need
# separate code.


# %%
def fsdp_train_step(
    shards: PyTree,
    specs: PyTree,
    batch: dict[str, jax.Array],
    model: Model,
    axis_name: str,
    learning_rate: jax.Array,
) -> tuple[PyTree, jax.Array]:
    """Take one step of SGD, gathering each layer while its neighbour computes. Runs inside ``shard_map``.

    Args:
        shards: Local parts of the parameters, all varying over ``axis_name``; under ``layers`` ``[num_layers, ...]``.
        specs: The ``PartitionSpec`` of each leaf; under ``layers`` its first entry belongs to the layer dim.
        batch: This device's rows, ``inputs``, ``targets`` and ``mask``, ``[batch/axis, ...]``.
        model: The model's pure functions.
        axis_name: The mesh axis that parameters and batch are split over.
        learning_rate: A scalar.

    Returns:
        ``(shards, loss)``: the updated parts, and the mean loss over all unmasked rows or tokens on all devices, the
        same on every device.
    """

    ### BEGIN SOLUTION
    layer_specs = jax.tree.map(lambda spec: P(*spec[1:]), specs["layers"])

    def take(stack, at):
        return jax.tree.map(lambda leaf: leaf[at], stack)

    def gather(part):
        return gather_params(part, layer_specs, axis_name)

    def scatter(gradients):
        def split(gradient, spec):
            if axis_name not in spec:
                return gradient
            total = lax.psum_scatter(gradient, axis_name, scatter_dimension=spec.index(axis_name), tiled=True)
            return total / lax.axis_size(axis_name)

        return jax.tree.map(split, gradients, layer_specs)

    def forward(stack, x):
        def step(carry, part):
            x, whole = carry
            coming = gather(part)
            return (model.layer(whole, x), coming), x

        (x, whole), inputs = lax.scan(step, (x, gather(take(stack, 0))), take(stack, slice(1, None)))
        return model.layer(whole, x), (stack, jnp.concatenate([inputs, x[None]]), whole)

    def backward(saved, gradient):
        stack, inputs, whole = saved

        def step(carry, layer):
            gradient, whole = carry
            part_before, x = layer
            coming = gather(part_before)
            of_whole, gradient = jax.vjp(model.layer, whole, x)[1](gradient)
            return (gradient, coming), scatter(of_whole)

        layers = take(stack, slice(-1)), inputs[1:]
        (gradient, whole), others = lax.scan(step, (gradient, whole), layers, reverse=True)
        first, gradient = jax.vjp(model.layer, whole, inputs[0])[1](gradient)
        return jax.tree.map(lambda one, more: jnp.concatenate([one[None], more]), scatter(first), others), gradient

    layers = jax.custom_vjp(lambda stack, x: forward(stack, x)[0])
    layers.defvjp(forward, backward)

    count = jnp.sum(batch["mask"])
    weight = count / lax.pmean(count, axis_name)

    def loss_of(shards):
        x = model.embed(gather_params(shards["embed"], specs["embed"], axis_name), batch["inputs"])
        x = layers(shards["layers"], x)
        head = gather_params(shards["head"], specs["head"], axis_name)
        return weight * model.loss(head, x, batch["targets"], batch["mask"])

    loss, gradients = jax.value_and_grad(loss_of)(shards)
    mean = jax.tree.map(lambda g, spec: g if axis_name in spec else lax.pmean(g, axis_name), gradients, specs)
    return jax.tree.map(lambda part, g: part - learning_rate * g, shards, mean), lax.pmean(loss, axis_name)
    ### END SOLUTION


# %% [markdown]
# ## Several nodes: `hybrid_shard_step`
#
# Links within a node are fast. Links between nodes are several times slower, and FSDP over all devices of all nodes
# sends every weight over them twice and every gradient once. Hybrid sharding splits the model over the devices of
# **one** node, and every node keeps its own copy. The mesh has two axes: parameters are split over `axis_name`, within
# a node, and replicated over `replica_axis`, across nodes. The batch is split over both.
#
# Each node then computes the mean gradient over its own rows, and each of its devices holds a part of it. The nodes
# must still agree. What is the least they have to send each other? For a model of 100 MB on 2 nodes of 4 devices:

# %%
if __name__ == "__main__":
    size, nodes, inside = 100.0, 2, 4
    everywhere = 3 * size * (nodes * inside - 1) / (nodes * inside)
    print(f"split over all 8 devices: each sends {everywhere:.1f} MB around a ring that crosses both nodes")
    for what, sent in (("the whole gradient", size), ("its part of the gradient", size / inside)):
        between = 2 * sent * (nodes - 1) / nodes
        print(f"split within a node: each all-reduces {what} across nodes, {between:.1f} MB")

# %% [markdown]
# Write the step. It need not prefetch: only the communication is graded. Gather whole arrays within the node, and send
# as little as possible between nodes.
#
# - On entry, every leaf of `shards` varies over both axes. Sharded leaves are the same on devices with the same index
#   in different nodes; leaves that stay whole are the same on all devices.
# - The gradient is the mean over all rows of all nodes, for every leaf; so is the loss.
# - Use `fsdp_loss`, your own from above.
#
# | budget | |
# |---|---|
# | all-gather within a node, over `axis_name` | at most twice per sharded leaf |
# | reduce-scatter within a node | once per sharded leaf |
# | all-reduce within a node | once per leaf that stays whole, and once for the loss |
# | any other collective within a node | none |
# | between nodes, over `replica_axis` | as much as all-reduces of the gradients' **parts**, whole leaves and loss |
#
# With `n` devices per node, `r` nodes, sharded leaves of `S` bytes and whole leaves of `W` bytes, a device sends
# `2 (r-1)/r (S/n + W)` bytes between nodes, or a little more if whole leaves are averaged over all devices at once.
# Which collectives you use is up to you.
#
# Useful: `lax.pmean` takes one axis, or a tuple of several.


# %%
def hybrid_shard_step(
    shards: PyTree,
    specs: PyTree,
    batch: dict[str, jax.Array],
    model: Model,
    axis_name: str,
    replica_axis: str,
    learning_rate: jax.Array,
) -> tuple[PyTree, jax.Array]:
    """Take one step of SGD, sharded within a node and replicated across nodes. Runs inside ``shard_map``.

    Args:
        shards: Local parts of the parameters, all varying over both axes; under ``layers`` ``[num_layers, ...]``.
        specs: The ``PartitionSpec`` of each leaf; names only ``axis_name``.
        batch: This device's rows, ``inputs`` and ``targets``, ``[batch/(axis * replica), ...]``.
        model: The model's pure functions.
        axis_name: The mesh axis within a node, along which parameters are split.
        replica_axis: The mesh axis across nodes.
        learning_rate: A scalar.

    Returns:
        ``(shards, loss)``: the updated parts, the same on every node, and the mean loss over all rows of all nodes.
    """

    ### BEGIN SOLUTION
    def mean(gradient, spec):
        return lax.pmean(gradient, replica_axis if axis_name in spec else (axis_name, replica_axis))

    loss, gradients = jax.value_and_grad(fsdp_loss)(shards, specs, batch, model, axis_name)
    gradients = jax.tree.map(mean, gradients, specs)
    updated = jax.tree.map(lambda part, gradient: part - learning_rate * gradient, shards, gradients)
    return updated, lax.pmean(loss, (axis_name, replica_axis))
    ### END SOLUTION


# %% [markdown]
# ## In your own words
#
# A colleague proposes to skip the second gather: "We just had the weights here, why send them again?" For a model of
# `L` identical layers with `W` bytes each on `n` devices, say what keeping the weights would cost in memory and save in
# communication, and when you would agree. A few sentences and two formulas are enough.

# %% [markdown]
# ### BEGIN SOLUTION
# Keeping the gathered weights costs about `L * W` bytes on each device at the end of the forward pass, instead of `W`
# (one layer at a time): as far as peak memory is concerned, sharding the parameters no longer helps. It saves one of
# two all-gathers, `L * W * (n - 1) / n` bytes of the `3 * L * W * (n - 1) / n` that a step sends (two gathers and a
# reduce-scatter), so a third of the communication. It is worth it if there is memory to spare and the network is the
# bottleneck; sharding only gradients and optimizer state (ZeRO-2) makes that choice permanent.
# ### END SOLUTION

# %% [markdown]
# ## Lab: what each device holds
#
# Now put everything together on 8 emulated devices. First, shard a Transformer and look at the parts each device holds.

# %%
if __name__ == "__main__":
    model = transformer(width=64, hidden=256, num_layers=2, num_heads=4, vocab=64, max_seq=32)
    params = jax.jit(model.init)(jax.random.key(0))

    def split(run, params, mesh, min_size):
        """Return the parts that ``shard_params`` keeps, and their specs."""
        captured = {}

        def parts(params):
            cut = shard_map_with_specs(lambda p: shard_params(p, "data", min_size), mesh, in_specs=(P(),))
            shards, captured["specs"] = cut(params)
            return shards

        return run(parts, params), captured["specs"]

    def now(function, params):
        return jax.jit(function)(params)

    shards, specs = split(now, params, make_mesh({"data": 8}), 1024)
    for path, shard in jax.tree.leaves_with_path(shards):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        print(f"{name:32} {shard.shape!s:16} on each device {shard.addressable_shards[0].data.shape}")
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    on_each = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(shards))
    print(f"whole model {whole:,} bytes, on each device {on_each:,} bytes: {on_each / whole:.3f} of it")

# %% [markdown]
# ## Lab: the same losses everywhere
#
# Now train it with `fsdp_train_step` on meshes of one device and of eight, with `hybrid_shard_step` on a four-by-two
# mesh, and with the course's plain single-device step. `shard_params` split the stacked leaves along their largest dim;
# that is never the layer dim, which is smaller than the others. Compiling all of it takes up to a minute on two cores.

# %%
if __name__ == "__main__":
    batches = [token_batch(0, i, batch=32, seq=32, vocab=64) | {"mask": jnp.ones((32, 32))} for i in range(8)]
    stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *batches)

    def train(step, mesh, *axes):
        shards, specs = split(now, params, mesh, 1024)

        def local(shards, batches):
            def one(shards, batch):
                return step(shards, specs, batch, model, *axes, jnp.float32(0.5))

            for axis in axes:
                shards = jax.tree.map(lambda leaf, axis=axis: as_varying(leaf, axis), shards)
            return lax.scan(one, shards, batches)[1]

        in_specs = (specs, P(None, axes))
        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=P()))(shards, stacked)

    runs = {
        "data=1": train(fsdp_train_step, make_mesh({"data": 1}), "data"),
        "data=8": train(fsdp_train_step, make_mesh({"data": 8}), "data"),
        "replica=4 x data=2": train(hybrid_shard_step, make_mesh({"replica": 4, "data": 2}), "data", "replica"),
    }
    plain_step, state = make_train_step(model, optax.sgd(0.5)), optax.sgd(0.5).init(params)
    plain = jax.tree.map(jnp.copy, params)
    print("step   one device", *(f"{name:>20}" for name in runs))
    for i, batch in enumerate(batches):
        plain, state, loss = plain_step(plain, state, batch)
        print(f"{i:4}   {loss:10.5f}", *(f"{losses[i]:20.5f}" for losses in runs.values()))

# %% [markdown]
# ## Lab: where the time goes
#
# Finally, your step at the size it is graded on, on 8 H100s: the timeline of the devices, and the contents of one
# device's memory at the peak. Nothing is computed for this: `export` captures the program, and `predict` simulates it.
# Profile `fsdp_loss` for comparison, with `meshcraft profile fsdp fsdp_loss`, and compare the gaps. Which communication
# is still exposed, and why is that unavoidable?

# %%
if __name__ == "__main__":
    wide = mlp(width=4096, hidden=16384, num_layers=8, num_inputs=2048, num_outputs=2048)
    shapes = jax.eval_shape(lambda: wide.init(jax.random.key(0)))
    shapes, wide_specs = split(jax.eval_shape, shapes, abstract_mesh({"data": 8}), 16384)
    kept = jax.tree.map(lambda spec: spec if "data" in spec else P("data"), wide_specs)

    def one_step(shards, batch):
        shards = jax.tree.map(lambda leaf: as_varying(leaf, "data"), shards)
        shards, loss = fsdp_train_step(shards, wide_specs, batch, wide, "data", jnp.float32(0.01))
        # A whole leaf's type still says "varying", so each device returns its own copy.
        return jax.tree.map(lambda leaf, spec: leaf if "data" in spec else leaf[None], shards, wide_specs), loss

    def program(shards, batch):
        mapped = jax.shard_map(
            one_step, mesh=abstract_mesh({"data": 8}), in_specs=(wide_specs, P("data")), out_specs=(kept, P())
        )
        shards, loss = mapped(shards, batch)
        return {"shards": shards, "loss": loss}

    rows, mask = jax.ShapeDtypeStruct((8 * 1792, 2048), "float32"), jax.ShapeDtypeStruct((8 * 1792,), "float32")
    inputs, in_specs = (
        {"shards": shapes, "batch": {"inputs": rows, "targets": rows, "mask": mask}},
        {"shards": wide_specs, "batch": P("data")},
    )
    step = export(
        program, inputs, in_specs, mesh={"data": 8}, out_specs={"shards": kept, "loss": P()}, donate=("shards",)
    )
    prediction = predict(step, "8xH100")
    for name, figure in prediction.figures().items():
        print(f"{name:24} {figure}")
    prediction  # noqa: B018  a notebook shows it as a picture

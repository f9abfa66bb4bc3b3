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
# In data parallelism, every device makes the same update with its own copy of the optimizer's state. With Adam in
# float32, that state is 8 of the 16 bytes that a parameter takes, and with `n` devices it exists `n` times. FSDP splits
# everything, but sends half as much again. ZeRO's first two stages split less, and the first of them sends no more than
# data parallelism does:
#
# | | split | bytes per parameter on each device |
# |---|---|---|
# | data parallelism | nothing | 4 + 4 + 8 |
# | ZeRO-1 | Adam's moments | 4 + 4 + 8/n |
# | ZeRO-2 | gradients as well | 4 + 4/n + 8/n |
# | ZeRO-3, FSDP | parameters as well | 4/n + 4/n + 8/n |
#
# You will write both stages, in five functions:
#
# | function | runs when | what it does |
# |---|---|---|
# | `shard_optimizer_state` | once, at the start | creates Adam's moments for this device's part of each leaf |
# | `global_norm` | every step | the norm of a gradient that is spread over devices |
# | `sharded_adamw` | every step | clips, updates this device's part, and gathers the parameters |
# | `zero1_step` | every step | a training step with sharded moments |
# | `zero2_step` | every step | the same with microbatches, and with gradients sharded between them |

# %%
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from course.data import token_batch
from course.mesh import abstract_mesh, as_varying, make_mesh, shard_map_with_specs
from course.model import Model, full_loss, mlp, transformer
from course.predict import predict
from course.program import export
from course.train import AdamW, make_train_step
from solutions.fsdp import shard_params

PyTree = Any
AxisName = Any  # the name of a mesh axis, or a tuple of several names that are used as one

# %% [markdown]
# ## Once: `shard_optimizer_state`
#
# Adam keeps two numbers for each parameter: `m`, the running mean of its gradient, and `v`, the running mean of the
# gradient's square. They start at zero, and only the update ever reads them. This is how much memory they take for a
# small Transformer:

# %%
if __name__ == "__main__":
    model = transformer(width=64, hidden=256, num_layers=2, num_heads=4, vocab=64, max_seq=32)
    params = jax.jit(model.init)(jax.random.key(0))
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    moments = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    print(f"parameters {whole:,} bytes, their gradients as many, Adam's state {moments:,} bytes")
    print(f"an eighth of Adam's state: {moments // 8:,} bytes")

# %% [markdown]
# Each device will update its own part of every large leaf, so it needs only the moments of that part. Split leaves by
# the rule of `shard_params` from the chapter `fsdp`: a leaf with fewer than `min_size` elements stays whole; any other
# is split along its largest dim that the number of devices divides, or stays whole if there is none.
#
# Return the state and the specs of the parts. The state also has `count`, the number of updates made so far: Adam needs
# it to correct its means, which start at zero.
#
# | budget | |
# |---|---|
# | bytes of state on each device | 8/n per element of a split leaf, 8 per element of a whole leaf, 4 for the count |
# | communication | none |
#
# Useful: `shard_params(params, axis_name, min_size)`, imported above, returns this device's parts and their specs.
# `axis_name` may be a tuple there too.


# %%
def shard_optimizer_state(params: PyTree, axis_name: AxisName, min_size: int) -> tuple[PyTree, PyTree]:
    """Create Adam's moments for this device's part of each leaf. Runs inside ``shard_map``.

    Args:
        params: Whole parameters, the same on every device.
        axis_name: The mesh axis to split over, or several of them.
        min_size: Leaves with fewer elements stay whole.

    Returns:
        ``(state, specs)``. The state is ``{"m": tree, "v": tree, "count": scalar}``: two trees like ``params`` with the
        local part ``[..., dim/axis, ...]`` of each leaf, all zeros, and the number of updates made, an ``int32``. The
        specs are a tree like ``params`` with the ``PartitionSpec`` of each part.
    """
    ### BEGIN SOLUTION
    parts, specs = shard_params(params, axis_name, min_size)
    moments = {name: jax.tree.map(jnp.zeros_like, parts) for name in ("m", "v")}
    return {**moments, "count": jnp.zeros((), jnp.int32)}, specs
    ### END SOLUTION


# %% [markdown]
# ## Once per step: `global_norm`
#
# Gradients are clipped by their global norm: the square root of the sum of the squares of *all* elements of all leaves.
# When leaves are split, no device has all elements. Each device computes a different number from the part that it
# holds, and if every device clips by its own number, copies of one parameter drift apart. Take two devices. One leaf is
# split, with 3 on the first device and 4 on the second. The other leaf is whole, a 12 on both. On a single device, the
# norm of (3, 4, 12) is 13.

# %%
if __name__ == "__main__":
    split, whole_leaf = jnp.array([3.0, 4.0]), 12.0
    print("each device by itself:         ", jnp.sqrt(split**2 + whole_leaf**2))
    print("everything summed over devices:", jnp.sqrt(jnp.sum(split**2 + whole_leaf**2)))
    print("each element once:             ", jnp.sqrt(jnp.sum(split**2) + whole_leaf**2))

# %% [markdown]
# Count each element exactly once, on any mesh. A leaf's spec says which axes it is split over. An entry of a spec is an
# axis's name, `None`, or a tuple of names where one dim is split over several axes; leaves of one tree may be split
# over different axes. A leaf with the spec `P()` is whole, and the same on every device.
#
# | budget | |
# |---|---|
# | all-reduce | at most one, of a single number, for each set of axes that leaves are split over |
# | bytes sent per device | at most 2(n-1)/n of 4 bytes for each of these, for n devices on its axes |
# | any other collective | none: no leaf is ever gathered |
#
# JAX accepts `lax.psum(x, axes)` only if `x` varies over all of `axes`, or over none of them; in the second case it
# multiplies `x` by the number of devices, without an error. The sum of a leaf's squares varies over the axes that the
# leaf is split over.
#
# Useful: `lax.psum` takes a tuple of axis names.


# %%
def global_norm(tree: PyTree, specs: PyTree) -> jax.Array:
    """Compute the Euclidean norm of all leaves, counting each element once. Runs inside ``shard_map``.

    Args:
        tree: Local parts, ``[..., dim/axis, ...]``, each varying over the axes that its spec names and over no others.
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
#
# Adam divides the mean of the gradient by the root of its mean square, so the *scale* of the gradient cancels:

# %%
if __name__ == "__main__":
    for gradient in (0.01, 0.08):
        m, v = (1 - 0.9) * gradient, (1 - 0.95) * gradient**2
        step = (m / (1 - 0.9)) / ((v / (1 - 0.95)) ** 0.5 + 1e-8)
        print(f"gradient {gradient}: m {m:.4f}, v {v:.6f}, first step of Adam {step:.6f}")

# %% [markdown]
# So with a gradient that is 8 times too large (a sum over devices where a mean was meant), a model trains almost as
# before. Only the norm (and with it the clipping), `m` and `v` are wrong. Therefore `check` compares all of these,
# not just the parameters.
#
# Write the part of a step that follows the backward pass. `gradients` are this device's parts of the mean gradient;
# leaves that stay whole are already averaged.
#
# 1. Take the global norm. If it is above `config.clip`, scale the whole gradient down so that its norm is
#    `config.clip`. Otherwise leave it as it is.
# 2. Update the moments with the clipped gradient `g`, where `t` is the number of updates including this one:
#
#         m = beta1 * m + (1 - beta1) * g          mean   = m / (1 - beta1**t)
#         v = beta2 * v + (1 - beta2) * g**2       square = v / (1 - beta2**t)
#
# 3. Update *this device's part* of each parameter:
#
#         p = p - learning_rate * (mean / (sqrt(square) + eps) + weight_decay * p)
#
#    Weight decay is for matrices, as in `train_step_dp`: leaves with two dims or more. A leaf under `layers` has one
#    more dim, for the layers, so a stack of biases is not a matrix. Other leaves are updated without decay.
# 4. Put the parameters together again, so that every device has all of them.
#
# | budget | |
# |---|---|
# | all-gather | (n-1)/n of the bytes of each split leaf: parameters, once |
# | all-reduce | 2(n-1)/n of 4 bytes, for the norm |
# | any other collective | none |
#
# `params` are whole. A leaf's spec says which part of it is this device's, as in `shard_params`. Return the norm before
# clipping: that is the one people plot.
#
# `axis_name` is the name of an axis, or a tuple of several axes that split the state together. Collectives,
# `lax.axis_index` and `lax.axis_size` accept either, and an entry of a spec can be either: `axis_name in spec` and
# `spec.index(axis_name)` work for both.
#
# Useful: `lax.dynamic_slice_in_dim`, `lax.all_gather(..., tiled=True)`, `jax.tree.map_with_path`, whose paths begin
# with an entry whose `key` is `"embed"`, `"layers"` or `"head"`.


# %%
def sharded_adamw(
    params: PyTree,
    gradients: PyTree,
    state: PyTree,
    specs: PyTree,
    axis_name: AxisName,
    config: AdamW,
) -> tuple[PyTree, PyTree, jax.Array]:
    """Clip by the global norm, update this device's part with AdamW, and gather. Runs inside ``shard_map``.

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
#
# Data parallelism all-reduces the gradient, and then every device updates everything. A device that updates only its
# part needs only its part of the gradient, and afterwards all devices need the new parameters. These two transfers
# are the halves of an all-reduce. For 100 MB of gradients on 8 devices:

# %%
if __name__ == "__main__":
    size, n = 100.0, 8
    print(f"all-reduce of the gradient:        {2 * size * (n - 1) / n:6.1f} MB sent by each device")
    print(f"reduce-scatter of the gradient:    {size * (n - 1) / n:6.1f} MB")
    print(f"all-gather of the new parameters:  {size * (n - 1) / n:6.1f} MB")

# %% [markdown]
# So ZeRO-1 sends what data parallelism sends, with the update between the halves. Write the step: loss and gradient of
# this device's rows, then the mean over devices, then your own `sharded_adamw` from above. Get that function right
# first.
#
# - Every leaf of `params` and of the state's moments enters varying over `axis_name`, so the gradient that JAX computes
#   is each device's own.
# - A device keeps its part of the mean gradient of a split leaf. The gradient of a leaf that stays whole is averaged,
#   once.
# - All rows count, and all devices have the same number of them. `course.model.full_loss(model, params, batch)` is the
#   mean loss of this device's rows. The returned loss is the mean over all devices.
#
# | budget | |
# |---|---|
# | reduce-scatter | (n-1)/n of the bytes of each split leaf, once |
# | all-gather | (n-1)/n of the bytes of each split leaf, once |
# | all-reduce | 2(n-1)/n of the bytes of leaves that stay whole, of the loss and of the norm's 4 bytes; no split leaf |
# | any other collective | none |
# | live temporaries | at most 2 times the reference's: one whole gradient, and no whole moments |
#
# Parameters, moments, losses and norms after one step and after three must equal those of a single device. `check` also
# compares your raw gradient, leaf by leaf: it recovers it from your first moments,
# `(m_after - beta1 * m_before) / (1 - beta1)`, and undoes the clipping with the norm that you return.
#
# Useful: `lax.psum_scatter(..., tiled=True)`, `lax.pmean`.


# %%
def zero1_step(
    params: PyTree,
    state: PyTree,
    specs: PyTree,
    batch: dict[str, jax.Array],
    model: Model,
    axis_name: AxisName,
    config: AdamW,
) -> tuple[PyTree, PyTree, jax.Array, jax.Array]:
    """Take one step of AdamW with sharded moments. Runs inside ``shard_map``.

    Args:
        params: Whole parameters, all varying over ``axis_name``; leaves under ``layers`` are ``[num_layers, ...]``.
        state: As from ``shard_optimizer_state``.
        specs: The ``PartitionSpec`` of each part; the caller ensures that the dim that stacks layers is not split.
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
#
# In `zero1_step`, every device holds the whole gradient for a moment, and with gradient accumulation for the whole
# step: 4 bytes per parameter, as much as the parameters themselves. ZeRO-2 never holds it. As soon as the backward pass
# has computed a layer's gradient, the gradient is reduce-scattered, and only this device's part is added to the sum.
#
# The price is communication. ZeRO-1 adds up whole gradients on each device and reduce-scatters the sum. Parts
# exist only after a reduce-scatter, so ZeRO-2 has one in every microbatch:

# %%
if __name__ == "__main__":
    size, n = 100.0, 8  # MB of gradients, and devices
    for microbatches in (1, 2, 4, 8, 16):
        sent = (microbatches + 1) * size * (n - 1) / n
        print(f"microbatches: {microbatches:2}, ZeRO-2 sends {sent:7.1f} MB, ZeRO-1 {2 * size * (n - 1) / n:6.1f} MB")

# %% [markdown]
# Write the step. Split this device's rows into `num_microbatches` equal parts, process them one after the other in a
# `lax.scan`, and carry the sums of the loss and of the gradient's parts.
#
# JAX's own derivative of a scan over layers is not enough: it returns the gradients of all layers at once. So write the
# backward pass as a scan of your own, as in `fsdp_train_step`: forward over the layers, keeping each layer's input; the
# loss; then in reverse over the layers, with `jax.vjp(model.layer, weights, x)`. Parameters are whole here, so nothing
# is gathered. Each iteration scatters one layer's gradient and adds it to that layer's place in the sum, which is in
# the carry: XLA then writes to it in place. If the scan stacks the parts as results instead, the stack is a second
# array as large as the sum.
#
# - Gradients of leaves that stay whole are added up as they are, and averaged over devices once per step.
# - The spec of one layer's gradient is the stacked leaf's without its first entry; `P()` has no entry to drop.
# - The loss and the gradient are means over all microbatches and devices; all microbatches have the same size.
# - After the last microbatch, use `sharded_adamw`.
#
# | budget | |
# |---|---|
# | live temporaries | at most 1.2 times the reference's 1.14 GiB: one stack of parts, not two |
# | reduce-scatter | (n-1)/n of the bytes of each split leaf, once per microbatch |
# | all-gather | (n-1)/n of the bytes of each split leaf, once |
# | all-reduce | 2(n-1)/n of the bytes of leaves that stay whole, of the loss and of the norm's 4 bytes |
# | any other collective | none |
#
# Memory is judged for 12 layers of width 4,096 and hidden size 16,384, with 4 microbatches. There a layer's gradient
# takes 512 MiB, the whole gradient 6 GiB, and a device's part of it an eighth of that.
#
# The model's parts are `model.embed(params["embed"], inputs)`, `model.layer(layer_params, x)` for one layer, and
# `model.loss(params["head"], x, targets)`. A scan's carry must have the same type before and after its body: zeros do
# not vary until you cast them with `lax.pcast(zeros, axis_name, to="varying")`, or with `vary_alike(zeros, x)[0]` from
# `course.mesh`, which makes them vary over the same axes as `x`. The loss varies too, so if you take its `jax.vjp`, the
# 1 that you pass back must vary; `jax.value_and_grad` takes care of that.
#
# Useful: `jax.vjp`, `lax.scan(..., reverse=True)`, `total.at[i].add(part)` for a traced `i`.


# %%
def zero2_step(
    params: PyTree,
    state: PyTree,
    specs: PyTree,
    batch: dict[str, jax.Array],
    model: Model,
    axis_name: AxisName,
    num_microbatches: int,
    config: AdamW,
) -> tuple[PyTree, PyTree, jax.Array, jax.Array]:
    """Take one step of AdamW over microbatches, with sharded moments and gradients. Runs inside ``shard_map``.

    Args:
        params: Whole parameters, all varying over ``axis_name``; leaves under ``layers`` are ``[num_layers, ...]``.
        state: As from ``shard_optimizer_state``.
        specs: The ``PartitionSpec`` of each part; under ``layers`` its first entry belongs to the layer dim.
        batch: This device's rows, ``inputs`` and ``targets``, ``[batch/axis, ...]``.
        model: The model's pure functions.
        axis_name: The mesh axis that batch and state are split over, or several of them.
        num_microbatches: Number of parts that a device's rows are split into; divides the number of rows.
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
            total = jax.tree.map(lambda t, g, s: t.at[number].add(part_of(g, s)), total, gradients, layer_specs)
            return (dx, total), None

        layers = jnp.arange(model.num_layers), params["layers"], inputs
        (dx, of_layers), _ = lax.scan(backward, (dx, total["layers"]), layers, reverse=True)
        ends = {"embed": embed_backward(dx)[0], "head": head}
        sums = {end: jax.tree.map(lambda t, g, s: t + part_of(g, s), total[end], ends[end], specs[end]) for end in ends}
        return (loss + more, {**sums, "layers": of_layers}), None

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
# Your model trains with ZeRO-1 on 8 GPUs and 16 microbatches. The devices' memory is full, and a colleague proposes
# ZeRO-2: "It saves seven eighths of the gradients and sends the same number of bytes; the paper says so." For `W` bytes
# of parameters, say what the change saves and what it sends. When would you agree, and what else could you try? A few
# sentences and two formulas are enough.

# %% [markdown]
# ### BEGIN SOLUTION
# ZeRO-2 saves `W * (n - 1) / n` bytes of gradients, `7/8 W` here. The paper's claim is for one microbatch: a
# reduce-scatter and an all-gather, `2 W (n - 1) / n` in all. With `M` microbatches, the gradient is reduce-scattered
# `M` times, so a device sends `(M + 1) W (n - 1) / n`: with 16 microbatches 17 times `W (n - 1) / n` instead of 2,
# which is 8.5 times as much. ZeRO-1 with accumulation still sends only `2 W (n - 1) / n`, since whole gradients can be
# added up on each device before a single reduce-scatter.
#
# I would agree if the transfers are hidden behind the backward pass, which needs enough tokens in every microbatch.
# Otherwise I would try fewer and larger microbatches with recomputed activations, which save memory and send less.
# ### END SOLUTION

# %% [markdown]
# ## Lab: the same losses everywhere
#
# Here the Transformer from above trains with AdamW, clipped at a norm of 1, on a mesh of one device, on eight devices,
# and on a 4 x 2 mesh whose axes split the state together. The first column is the course's plain single-device step,
# with optax. Compiling all of it takes about 10 seconds.

# %%
if __name__ == "__main__":
    config = AdamW(learning_rate=3e-3)
    batches = [token_batch(0, i, batch=32, seq=32, vocab=64) for i in range(8)]
    stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *batches)

    def train(step, axes, axis_name, *how):
        mesh, captured = make_mesh(axes), {}

        def on_device(params):
            state, specs = shard_optimizer_state(params, axis_name, 1024)
            return state, {"m": specs, "v": specs, "count": P()}

        def begin(params):
            state, captured["specs"] = shard_map_with_specs(on_device, mesh, in_specs=(P(),))(params)
            return state

        def varying(tree):
            for axis in axes:
                tree = jax.tree.map(lambda leaf, axis=axis: as_varying(leaf, axis), tree)
            return tree

        def local(params, state, batches):
            def one(carry, batch):
                params, state, loss, norm = step(*carry, specs["m"], batch, model, axis_name, *how, config)
                return varying((params, state)), (loss, norm)

            return lax.scan(one, varying((params, state)), batches)[1]

        state = jax.jit(begin)(params)
        specs = captured["specs"]
        mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), specs, P(None, tuple(axes))), out_specs=P())
        return jax.jit(mapped)(params, state, stacked)

    runs = {
        "ZeRO-1, data=1": train(zero1_step, {"data": 1}, "data"),
        "ZeRO-1, data=8": train(zero1_step, {"data": 8}, "data"),
        "ZeRO-2, node=4 x data=2": train(zero2_step, {"node": 4, "data": 2}, ("node", "data"), 4),
    }
    matrices = jax.tree.map_with_path(lambda path, p: p.ndim - (path[0].key == "layers") >= 2, params)
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(config.learning_rate, config.beta1, config.beta2, weight_decay=config.weight_decay, mask=matrices),
    )
    plain_step, state, plain = make_train_step(model, optimizer), optimizer.init(params), jax.tree.map(jnp.copy, params)
    print("step  one device", *(f"{name:>24}" for name in runs), "   its norm")
    for i, batch in enumerate(batches):
        plain, state, loss = plain_step(plain, state, batch)
        norm = runs["ZeRO-2, node=4 x data=2"][1][i]
        print(f"{i:4}  {loss:10.5f}", *(f"{losses[i]:24.5f}" for losses, _ in runs.values()), f"{norm:11.4f}")

# %% [markdown]
# ## Lab: what a device holds
#
# Finally, your two steps at the size they are graded on, on 8 H100s. Nothing is computed here: `export` captures the
# program, and `predict` analyses it. Between steps a device keeps the parameters and its parts of the moments, 5 bytes
# per parameter. Most of what is added at the peak is gradients. Compare it with the table at the top of this notebook.

# %%
if __name__ == "__main__":
    wide = mlp(width=4096, hidden=16384, num_layers=12, num_inputs=2048, num_outputs=2048)
    shapes = jax.eval_shape(lambda: wide.init(jax.random.key(0)))
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    mesh, names = abstract_mesh({"data": 8}), {}

    def begin_wide(params):
        state, names["specs"] = shard_optimizer_state(params, "data", 16384)
        return jax.tree.map(lambda leaf: as_varying(leaf, "data")[None], state)

    own = jax.eval_shape(jax.shard_map(begin_wide, mesh=mesh, in_specs=P(), out_specs=P("data")), shapes)
    rows = jax.ShapeDtypeStruct((8 * 64, 2048), "float32")
    inputs = {"params": shapes, "state": own, "batch": {"inputs": rows, "targets": rows}}
    in_specs = {"params": P(), "state": P("data"), "batch": P("data")}

    def program(step, *how):
        def local(params, state, batch):
            state = jax.tree.map(lambda leaf: leaf[0], state)
            params = jax.tree.map(lambda leaf: as_varying(leaf, "data"), params)
            params, state, *_ = step(params, state, names["specs"], batch, wide, "data", *how, config)
            # Each device returns what it holds.
            return jax.tree.map(lambda leaf: as_varying(leaf, "data")[None], {"params": params, "state": state})

        out_specs = {"params": P("data"), "state": P("data")}
        mapped = jax.shard_map(local, mesh=mesh, in_specs=tuple(in_specs.values()), out_specs=out_specs)
        exported = export(
            lambda **given: mapped(*given.values()), inputs, in_specs, mesh=dict(mesh.shape), out_specs=out_specs
        )
        return predict(exported, "8xH100")

    for name, prediction in (("ZeRO-1", program(zero1_step)), ("ZeRO-2, 4 microbatches", program(zero2_step, 4))):
        kept, more = prediction.memory.arguments / count, prediction.memory.temporaries / count
        print(f"{name:24} {kept:.2f} bytes per parameter, and {more:.2f} more at the peak")

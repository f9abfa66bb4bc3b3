# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Data parallelism
#
# Eight devices hold eight copies of one model, and the batch is split into eight parts. Each device computes the
# gradient of its own rows. The mean of these gradients, weighted by the number of unmasked rows on each device, is the
# gradient of the whole batch, so after one all-reduce every device makes the same update, and the copies stay equal
# without ever being sent.
#
# That is the whole idea. The details to get right are: which device draws which random numbers, what to average over
# which axes, how often to send it, and what the devices do in the meantime.
# | function | when it runs | what it does |
# |---|---|---|
# | `fold_key_over_axes` | before anything random | gives devices different keys along the named axes, and only there |
# | `sync_gradients` | once per step | averages each gradient over the axes that its leaf is replicated over |
# | `train_step_dp` | every step | accumulates over microbatches, synchronises once, updates |
# | `overlapped_gradients` | every step | synchronises each layer while the backward pass continues |

# %%
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from course.data import regression_batch
from course.machines import machine
from course.mesh import abstract_mesh, make_mesh
from course.model import Model, full_loss, mlp
from course.predict import predict
from course.program import export
from course.train import make_train_step

PyTree = Any

# %% [markdown]
# ## Randomness: `fold_key_over_axes`
#
# A key enters a training step replicated: every device holds the same one, and draws the same numbers from it. For
# dropout that is wrong along `data`. Each device has different rows, and the same mask on all of them gives less noise
# than you asked for. Along an axis on which devices hold the *same* activations (often `tensor`) it is right, and
# different masks would be a mistake: the replicas would drift apart.

# %%
if __name__ == "__main__":
    mesh = make_mesh({"data": 4, "tensor": 2})

    def kept(key):
        return jax.random.bernoulli(key, 0.5, (1, 1, 6)).astype(jnp.int32)

    same = jax.shard_map(kept, mesh=mesh, in_specs=P(), out_specs=P("data", "tensor"))
    for place, mask in enumerate(same(jax.random.key(0)).reshape(8, 6)):
        print(f"data {place // 2}, tensor {place % 2}: keeps {mask}")

# %% [markdown]
# `fold_key_over_axes` turns this one key into a key for each device:
#
# - Two devices that differ along a **named** axis get different keys, on every mesh.
# - Two devices that differ only along axes that are **not named** get the same key. If no axis is named, all keys are
#   equal.
# - If any axis is named, whatever its size, no device keeps the original key: other code may use it to draw numbers
#   that must be equal everywhere.
# - Runs that start from different keys share none, even with adjacent seeds such as 0 and 1: no device of one run may
#   hold a key that any device of the other run holds.
#
# | | |
# |---|---|
# | key, inside `shard_map` | replicated on entry; on return varying over at most the named axes |
# | communication | none |
#
# Useful: `jax.random.fold_in`, `lax.axis_index`.


# %%
def fold_key_over_axes(key: jax.Array, axis_names: tuple[str, ...]) -> jax.Array:
    """Derive a key that differs over the named axes and only over them. Runs inside ``shard_map``.

    Args:
        key: One key, as from ``jax.random.key``, the same on every device.
        axis_names: The mesh axes along which keys should differ; may be empty.

    Returns:
        One key on each device.
    """
    ### BEGIN SOLUTION
    for name in axis_names:
        key = jax.random.fold_in(key, lax.axis_index(name))
    return key
    ### END SOLUTION


# %% [markdown]
# ## One mean per leaf: `sync_gradients`
#
# After the backward pass, each device holds the gradient of its own loss. For a leaf that is **replicated** over an
# axis, the devices along that axis hold different gradients of the same parameters, and the step needs their mean. For
# a leaf that is **sharded** over an axis, they hold gradients of different parameters: there is nothing to average, and
# averaging would mix unrelated parts.
#
# A leaf's spec tells you which case applies. Here are both on `data=2 x tensor=2`, a kernel that is split over `tensor`
# and a norm's scale that is not:

# %%
if __name__ == "__main__":
    kernel = jnp.array([[1.0, 10.0], [3.0, 30.0]])  # the devices' gradients: a row for each index along data
    scale = jnp.array([[1.0, 2.0], [3.0, 6.0]])
    print("kernel, P('tensor'): each column is a separate part; means", kernel.mean(0))
    print("scale,  P():         all four are gradients of one parameter; mean", scale.mean())

# %% [markdown]
# An entry of a spec is an axis name, `None`, or a tuple of names if one dim is split over several axes:
# `P(None, ("data", "tensor"))`. It may name axes that are not in `axis_names`.
#
# | budget | |
# |---|---|
# | all-reduce | at most one for each leaf that is replicated over a named axis, over all these axes at once |
# | bytes sent per device | 2(n-1)/n of each of these leaves, averaged over n devices |
# | any other collective | none |
#
# On entry, every leaf varies over all axes of the mesh: these are the devices' own gradients, and nothing has been
# summed yet.
#
# Useful: `lax.pmean` takes a tuple of axis names.


# %%
def sync_gradients(gradients: PyTree, specs: PyTree, axis_names: tuple[str, ...]) -> PyTree:
    """Average each gradient over the axes that its leaf is replicated over. Runs inside ``shard_map``.

    Args:
        gradients: This device's gradients; for a sharded leaf its local part ``[..., dim/axis, ...]``.
        specs: A tree like ``gradients`` with each leaf's ``PartitionSpec``.
        axis_names: The mesh axes to average over.

    Returns:
        A tree like ``gradients``: the mean over the axes in ``axis_names`` that the leaf's spec does not name.
    """

    ### BEGIN SOLUTION
    def sync(gradient, spec):
        split_over = jax.tree.leaves(tuple(spec))  # flattens tuples of names and drops None
        replicated_over = tuple(name for name in axis_names if name not in split_over)
        return lax.pmean(gradient, replicated_over) if replicated_over else gradient

    return jax.tree.map(sync, gradients, specs)
    ### END SOLUTION


# %% [markdown]
# ## A whole step: `train_step_dp`
#
# Where does the all-reduce come from? Not always from you. The type of every value in `jax.shard_map` includes the axes
# over which it may differ from device to device, and autodiff follows these types. The gradient of a replicated
# parameter must come out replicated, so JAX inserts the reduction into the backward pass itself: a **sum**, wherever
# the parameter meets data.

# %%
if __name__ == "__main__":
    mesh = make_mesh({"data": 8})

    def all_reduces(function):
        local = jax.shard_map(function, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
        return jax.jit(local).lower(jnp.ones(3), jnp.ones((8, 3))).as_text().count("all_reduce")

    def replicated(weights, rows):
        gradient = jax.grad(lambda w: jnp.mean(rows @ w))(weights)
        return lax.pcast(gradient, "data", to="varying")[None]

    def varying(weights, rows):
        return jax.grad(lambda w: jnp.mean(rows @ w))(lax.pcast(weights, "data", to="varying"))[None]

    print("gradient of replicated weights:", all_reduces(replicated), "all-reduce")
    print("gradient of varying weights:   ", all_reduces(varying), "all-reduce")

# %% [markdown]
# This matters with gradient accumulation. A batch that does not fit is processed in `num_microbatches` parts, one after
# the other, in a `lax.scan`; gradients are summed. If the reduction is inside the scan, it runs once per microbatch,
# and the step sends `num_microbatches` times the bytes. One reduction at the end is enough, since the order of
# summation does not matter.
#
# Sequences are padded to one length, and padding must not count. `batch["mask"]` is 1 for each row (of an MLP's batch)
# or token (of a Transformer's) that counts, and 0 elsewhere. The loss is the mean over **all unmasked rows or tokens,
# on all devices**. Devices and microbatches hold different numbers of them, some none at all, so a mean of their means
# is not the same. Do not branch on the data (`lax.cond`) to skip one without any: weight it by zero. Here are three
# devices with the losses of their tokens:

# %%
if __name__ == "__main__":
    losses = [jnp.array([1.0]), jnp.array([2.0, 4.0, 6.0]), jnp.array([])]
    print("mean over all unmasked tokens ", jnp.concatenate(losses).mean())
    print("mean of the devices' two means", jnp.stack([losses[0].mean(), losses[1].mean()]).mean())

# %% [markdown]
# Write the whole step. Parameters enter **replicated**; whether they vary while you differentiate is up to you.
# 1. Split this device's rows into `num_microbatches` equal parts, in order.
# 2. Sum loss and gradient over the parts with `lax.scan`, each part weighted by its share of the mean.
# 3. Reduce over the devices, once.
# 4. Update by SGD with weight decay. Return the new parameters, the loss and the gradients, each the same on every
#    device. The gradients are those of the loss alone, without decay.
#
# Weight decay pulls **kernels and embedding tables** towards zero: they become
# `p - learning_rate * (gradient + weight_decay * p)`. Biases and scales of norms become `p - learning_rate * gradient`.
# Distinguish them by their number of dims: two or more, or one. Leaves under `layers` have an extra leading dim, the
# layer: a stack of biases is `[num_layers, features]`, and each of them is still a bias.
# | budget per step | |
# |---|---|
# | all-reduce | at most one for each leaf of the parameters, one for the loss and one for the unmasked count |
# | bytes sent per device | 2(n-1)/n of the parameters' bytes, and of 4 bytes each for the loss and the count |
# | any other collective | none |
# | live temporaries | at most 1.5 times the reference's: activations of one microbatch, not of all |
#
# The parameters after each of three steps on three batches, each leaf's raw gradient, and the losses must equal those
# on one device.
#
# `course.model.full_loss(model, params, batch)` is the mean loss over the unmasked part of `batch`, and 0 if everything
# is masked. A scan's carry must have the same type before and after its body: `float32[8]{V:data}` is an array that
# varies over `data`, but zeros do not vary until you cast them with `lax.pcast(..., to="varying")`.


# %%
def train_step_dp(
    params: PyTree,
    batch: dict[str, jax.Array],
    model: Model,
    axis_name: str,
    num_microbatches: int,
    learning_rate: float,
    weight_decay: float,
) -> tuple[PyTree, jax.Array, PyTree]:
    """Take one step of SGD on a batch that is split over the devices. Runs inside ``shard_map``.

    Args:
        params: The parameters, the same on every device; leaves under ``layers`` are ``[num_layers, ...]``.
        batch: This device's rows, ``inputs``, ``targets`` and ``mask``, ``[batch/axis, ...]``.
        model: The model's pure functions.
        axis_name: The mesh axis that the batch is split over.
        num_microbatches: Number of parts to process a device's rows in; divides the number of rows.
        learning_rate: SGD learning rate.
        weight_decay: The multiple of each kernel or table that is added to its gradient in the update.

    Returns:
        ``(params, loss, gradients)``: updated parameters, the mean loss over all unmasked rows or tokens on all
        devices, and its gradient at the old parameters. All of them are the same on every device.
    """
    ### BEGIN SOLUTION
    varying = jax.tree.map(lambda p: lax.pcast(p, axis_name, to="varying"), params)
    microbatches = jax.tree.map(lambda rows: rows.reshape(num_microbatches, -1, *rows.shape[1:]), batch)
    count = lax.psum(jnp.sum(batch["mask"]), axis_name)

    def accumulate(total, microbatch):
        share = jnp.sum(microbatch["mask"]) / count
        loss_and_gradients = jax.value_and_grad(lambda p: share * full_loss(model, p, microbatch))(varying)
        return jax.tree.map(jnp.add, total, loss_and_gradients), None

    nothing = jax.tree.map(jnp.zeros_like, (lax.pcast(jnp.zeros(()), axis_name, to="varying"), varying))
    total, _ = lax.scan(accumulate, nothing, microbatches)
    loss, gradients = lax.psum(total, axis_name)

    def updated(part):
        def update(p, g):
            matrix = p.ndim - (part == "layers") >= 2
            return p - learning_rate * (g + weight_decay * p if matrix else g)

        return jax.tree.map(update, params[part], gradients[part])

    return {part: updated(part) for part in params}, loss, gradients
    ### END SOLUTION


# %% [markdown]
# ## Behind the backward pass: `overlapped_gradients`
#
# In `train_step_dp` the devices first compute, and then send. While they send, nothing is computed. But the last
# layer's gradient is ready long before the first layer's, and could already be on its way. How much communication is
# there to hide, and behind what? For a layer of width 2,048 and hidden size 8,192 with 4,096 rows on each of 8 A5000s:

# %%
if __name__ == "__main__":
    a5000 = machine("8xA5000")
    weights = 2 * 2048 * 8192
    backward = 2 * 2 * 4096 * weights / (a5000.matmul_flops["f32"] * a5000.efficiency.matmul)
    reduction = 2 * 7 / 8 * 4 * weights / a5000.bandwidth_of(tuple(range(8)))
    print(f"backward pass of a layer {1e3 * backward:.1f} ms, reduction of its gradient {1e3 * reduction:.1f} ms")

# %% [markdown]
# So a layer's reduction fits behind another layer's backward pass. Accumulate as before, but do not wait for the end:
# in the **last** microbatch, where gradients become final one layer after the other, start each layer's reduction as
# early as possible, and let it run while earlier layers are computed. All other microbatches send nothing.
#
# The timeline executes your program as follows, and the GPU's compiler does much the same:
#
# - Computations run in program order. A reduction starts as soon as its operand has been computed, wherever in the
#   program it is called, and runs concurrently with whatever comes next.
# - An iteration of a loop ends when both its computations **and** its communication have ended. An iteration's
#   communication hides behind the computations of that same iteration only.
# - Adding the earlier microbatches' gradients is a computation like any other, and so is dividing the result of a
#   reduction. The division has to wait for the reduction; outside a loop, everything after it in program order then
#   waits as well. Dividing the gradients once the `lax.scan` has returned them delays no transfer, but reads and writes
#   all of them once more.
#
# | budget | |
# |---|---|
# | exposed communication on 8 A5000s | at most 0.35 times that of synchronising once after the whole backward pass |
# | predicted time | at most that of synchronising once, minus 0.1625 times its exposed time |
# | bytes sent per device | 2(n-1)/n of the parameters' bytes, and of 4 bytes for the unmasked count |
# | any other collective | none |
#
# Hiding transfers behind extra work does not count: the step itself must become faster.
#
# The budget is measured at the size of the example above, with 12 layers and 2 microbatches. The loss is the mean over
# all unmasked rows or tokens, as in `train_step_dp`. Each device returns **its share** of it: the shares add up to the
# loss. The gradients are those of the loss, the same on every device. Parameters arrive **varying**: nothing is reduced
# unless you say so.
#
# `model.embed(params["embed"], inputs)`, `model.layer(layer_params, x)` for one layer and
# `model.loss(params["head"], x, targets, mask)`, the mean over the unmasked part or 0 if everything is masked, are the
# model's parts. Leaves under `layers` are stacked, `[num_layers, ...]`. There may be only one layer, and only one
# microbatch.
#
# Useful: `jax.vjp` gives a function's value and its backward pass as a function; `lax.scan(..., reverse=True)` walks
# from the last layer to the first. `check(overlapped_gradients)` shows the exposed time, and
# `meshcraft profile data_parallel overlapped_gradients` the timeline. If the extra `aot` is installed,
# `meshcraft check data_parallel overlapped_gradients --aot` also reports the exposed communication in the GPU
# compiler's schedule. That is for information only and does not affect your points.


# %%
def overlapped_gradients(
    params: PyTree, batch: dict[str, jax.Array], model: Model, axis_name: str, num_microbatches: int
) -> tuple[jax.Array, PyTree]:
    """Compute gradients, reducing each layer's during the last backward pass. Runs inside ``shard_map``.

    Args:
        params: The parameters; every leaf varies over ``axis_name``; leaves under ``layers`` are
            ``[num_layers, ...]``.
        batch: This device's rows, ``inputs``, ``targets`` and ``mask``, ``[batch/axis, ...]``.
        model: The model's pure functions.
        axis_name: The mesh axis that the batch is split over.
        num_microbatches: Number of parts to process a device's rows in; divides the number of rows.

    Returns:
        ``(loss, gradients)``: this device's share of the mean loss over all unmasked rows or tokens on all devices
        (the shares add up to it), and the gradient of that mean.
    """
    ### BEGIN SOLUTION
    microbatches = jax.tree.map(lambda rows: rows.reshape(num_microbatches, -1, *rows.shape[1:]), batch)
    earlier = jax.tree.map(lambda rows: rows[:-1], microbatches)
    last = jax.tree.map(lambda rows: rows[-1], microbatches)
    count = lax.psum(jnp.sum(batch["mask"]), axis_name)

    def share(part):
        return jnp.sum(part["mask"]) / count

    def accumulate(total, microbatch):
        loss_and_gradients = jax.value_and_grad(lambda p: share(microbatch) * full_loss(model, p, microbatch))(params)
        return jax.tree.map(jnp.add, total, loss_and_gradients), None

    nothing = jax.tree.map(jnp.zeros_like, (lax.pcast(jnp.zeros(()), axis_name, to="varying"), params))
    (loss, total), _ = lax.scan(accumulate, nothing, earlier)

    def complete(gradient, before):
        return jax.tree.map(jnp.add, gradient, before)

    # Forward through the last microbatch; each layer's input is kept.
    x, embed_backward = jax.vjp(lambda p: model.embed(p, last["inputs"]), params["embed"])
    x, inputs = lax.scan(lambda x, layer: (model.layer(layer, x), x), x, params["layers"])
    last_loss, head_backward = jax.vjp(lambda p, x: model.loss(p, x, last["targets"], last["mask"]), params["head"], x)
    head, dx = head_backward(share(last))
    head = lax.psum(complete(head, total["head"]), axis_name)

    def layer_backward(dx, layer, x, before):
        gradient, dx = jax.vjp(model.layer, layer, x)[1](dx)
        return dx, complete(gradient, before)

    # Backward: while a layer computes, the gradient of the layer after it is reduced. The sum with the earlier
    # microbatches is part of the iteration before, so that a reduction can start at once.
    def step(carry, layer_and_input):
        dx, waiting = carry
        synced = lax.psum(waiting, axis_name)
        return layer_backward(dx, *layer_and_input), synced

    stack = (params["layers"], inputs, total["layers"])
    carry = layer_backward(dx, *jax.tree.map(lambda leaf: leaf[-1], stack))
    (dx, waiting), synced = lax.scan(step, carry, jax.tree.map(lambda leaf: leaf[:-1], stack), reverse=True)
    first = lax.psum(waiting, axis_name)
    layers = jax.tree.map(lambda one, rest: jnp.concatenate([one[None], rest]), first, synced)
    embed = lax.psum(complete(embed_backward(dx)[0], total["embed"]), axis_name)
    return loss + share(last) * last_loss, {"embed": embed, "layers": layers, "head": head}
    ### END SOLUTION


# %% [markdown]
# ## In your own words
#
# Your model trains well on 8 devices with 4,096 rows each. You are given 64 devices with the same links. One colleague
# wants to keep 4,096 rows per device, another wants to keep the global batch as it was. For each proposal: what happens
# to the bytes each device sends, to the step time, and to the training itself? A few sentences and one formula are
# enough.

# %% [markdown]
# ### BEGIN SOLUTION
# A device sends `2 * W * (n - 1) / n` bytes for `W` bytes of gradients: 1.75 W with 8 devices, 1.97 W with 64. So in
# both cases communication stays about the same.
#
# With 4,096 rows per device, computation per device also stays the same: a step takes about as long, the overlap works
# as before, and each step processes eight times as many rows. But the batch is eight times larger. Up to the critical
# batch size, that cuts the number of steps nearly eightfold if the learning rate is adapted (linear scaling with a
# warm-up is the usual rule); beyond it the extra rows hardly improve the gradient, and most of the added work is lost.
#
# With the same global batch, training is unchanged, step for step. Each device has 512 rows, an eighth of the
# computation, and the same bytes to hide behind it: `2 * W * (n - 1) / (n * bandwidth)` is now longer than the backward
# pass, and the step takes as long as its reduction. Eight times the devices give far less than eight times the speed.
# ### END SOLUTION

# %% [markdown]
# ## Lab: one model, eight batches
#
# Here is your step on 8 emulated devices, with four microbatches on each. About a third of the rows are padding, a
# different number on each device. The last column is the same model on one device with the whole batch: the losses are
# the same.

# %%
if __name__ == "__main__":
    mesh = make_mesh({"data": 8})
    model = mlp(width=64, hidden=256, num_layers=4, num_inputs=16, num_outputs=8)
    params = plain = model.init(jax.random.key(0))
    plain_step, plain_state = make_train_step(model, optax.sgd(0.02)), optax.sgd(0.02).init(plain)
    plain = jax.tree.map(jnp.copy, plain)

    def local(params, batch):
        params, loss, _ = train_step_dp(params, batch, model, "data", 4, 0.02, 0.0)
        return params, loss

    step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    for i in range(6):
        batch: dict[str, Any] = regression_batch(0, i, batch=64, num_inputs=16, num_outputs=8)
        batch["mask"] = jax.random.bernoulli(jax.random.key(i), 2 / 3, (64,)).astype(jnp.float32)
        params, loss = step(params, batch)
        plain, plain_state, plain_loss = plain_step(plain, plain_state, batch)
        print(f"step {i}   8 devices, 4 microbatches {loss:.5f}   one device {plain_loss:.5f}")

# %% [markdown]
# And here is the timeline of your `overlapped_gradients` on 8 A5000s, predicted from its program alone: the row of
# transfers is under the row of computations. Below the timeline you see what is in memory at the peak.

# %%
if __name__ == "__main__":
    large = mlp(width=2048, hidden=8192, num_layers=12, num_inputs=2048, num_outputs=2048)

    def gradients_of(params, batch):
        varying = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)
        loss, gradients = overlapped_gradients(varying, batch, large, "data", 2)
        return {"loss": lax.psum(loss, "data"), "gradients": gradients}

    shapes = {
        "params": jax.eval_shape(large.init, jax.random.key(0)),
        "batch": {name: jax.ShapeDtypeStruct((8 * 8192, 2048), jnp.float32) for name in ("inputs", "targets")},
    }
    shapes["batch"]["mask"] = jax.ShapeDtypeStruct((8 * 8192,), jnp.float32)
    specs = {"params": P(), "batch": P("data")}
    out_specs = {"loss": P(), "gradients": P()}
    whole = jax.shard_map(gradients_of, mesh=abstract_mesh({"data": 8}), in_specs=(P(), P("data")), out_specs=out_specs)
    program = export(lambda params, batch: whole(params, batch), shapes, specs, mesh={"data": 8}, out_specs=out_specs)
    prediction = predict(program, "8xA5000", name="overlapped_gradients")
    for name, figure in prediction.figures().items():
        print(f"{name:20} {figure}")

# %%
if __name__ == "__main__":
    from IPython.display import HTML, display

    from course.render import memory_svg, timeline_svg

    display(HTML(timeline_svg(prediction.timeline)), HTML(memory_svg(prediction.memory)))

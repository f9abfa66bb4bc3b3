# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Pipelines
#
# FSDP splits every layer over all devices and sends weights. A pipeline leaves layers whole and sends *activations*:
# the first device holds the first layers, the next device the next ones, and each passes its output on to the next.
# Each position in this sequence is called a **stage**.
#
# With a single batch, only one stage would have work at a time. So the batch is split into **microbatches** that follow
# each other through the stages, and after a few ticks all stages are busy, each with a different microbatch. At the
# beginning and the end, some stages wait: that is the **bubble**.
#
# You will write it in five functions:
#
# | function | what it does |
# |---|---|
# | `split_microbatches` | splits a batch into microbatches |
# | `pipeline_tick` | one tick of one stage: pick the input, compute, pass on |
# | `execute_pipeline` | all ticks, for any number of stages and microbatches |
# | `pipeline_loss` | a model's loss over the stages, with gradients at the right scale on each of them |
# | `pipeline_train_step` | the whole step on `data` x `pipe`, with little memory |

# %%
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from IPython.display import HTML, display
from jax import lax
from jax.sharding import PartitionSpec as P

from course.data import token_batch
from course.machines import machine
from course.mesh import abstract_mesh, as_varying, make_mesh
from course.model import Model, full_loss, layer_key, mlp, transformer
from course.predict import predict
from course.program import export
from course.render import schedule_svg
from course.schedules import forwards, gpipe, written
from solutions.data_parallel import fold_key_over_axes

PyTree = Any

# %% [markdown]
# ## Split the batch: `split_microbatches`
#
# Microbatches have the same size, since every tick runs the same program. Here are twelve rows in three microbatches:

# %%
if __name__ == "__main__":
    for number, rows in enumerate(np.array_split(np.arange(12), 3)):
        print(f"microbatch {number}: rows {rows}")

# %% [markdown]
# - Microbatch 0 is the first `batch / num_microbatches` rows, in order, and so on. Every leaf of `batch` is split this
#   way.
# - Reject a batch that cannot be split into equal parts: raise a `ValueError` that names both numbers, the rows and
#   `num_microbatches`. If rows were dropped silently, nobody would notice.
#
# | | |
# |---|---|
# | each leaf | `[batch/data, ...]` becomes `[num_microbatches, microbatch_size, ...]` |
# | communication | none |


# %%
def split_microbatches(batch: PyTree, num_microbatches: int) -> PyTree:
    """Split a batch into equal parts, in the order of its rows.

    Args:
        batch: A tree of arrays ``[rows, ...]``.
        num_microbatches: Number of parts.

    Returns:
        The same tree with leaves ``[num_microbatches, rows/num_microbatches, ...]``.

    Raises:
        ValueError: The rows cannot be split into that many equal parts; the message names both numbers.
    """

    ### BEGIN SOLUTION
    def split(leaf):
        rows = leaf.shape[0]
        if rows % num_microbatches:
            raise ValueError(f"{rows} rows cannot be split into {num_microbatches} equal microbatches")
        return leaf.reshape(num_microbatches, rows // num_microbatches, *leaf.shape[1:])

    return jax.tree.map(split, batch)
    ### END SOLUTION


# %% [markdown]
# ## One tick of one stage: `pipeline_tick`
#
# All devices run the same program, so a device finds out which stage it is with `lax.axis_index`. In one tick, it
# 1. picks its input: the first stage takes the next microbatch, the others the activations that have just arrived;
# 2. computes;
# 3. passes its result on to the next stage.
#
# For step 3 there is `lax.ppermute`, which takes pairs of a sender and a receiver. A device that is not a receiver gets
# zeros:

# %%
if __name__ == "__main__":
    numbered = jax.shard_map(
        lambda x: lax.ppermute(x, "pipe", [(0, 1), (1, 2), (2, 3)]),
        mesh=make_mesh({"pipe": 4}),
        in_specs=P("pipe"),
        out_specs=P("pipe"),
    )
    print("each sends 10 times its index:", numbered(10 * jnp.arange(4)))

# %% [markdown]
# The stage's computation is passed to you as a function, `stage(x, microbatch)`. It takes the activations of one
# microbatch, and the microbatch's number as an integer (possibly traced), for anything that differs between
# microbatches, such as dropout. So you must know which microbatch a stage works on at a tick. Microbatch 0 enters stage
# 0 at tick 0.
#
# At the beginning and the end a stage has nothing to do. It may then compute anything, even garbage, since the result
# is not used and devices that run one program in lockstep have nothing better to do. The number of its microbatch is
# then negative or past the last one: be careful when you index with it.
#
# | | |
# |---|---|
# | `microbatches` | `[num_microbatches, microbatch_size, ...]`, the same on every stage, varying over `axis_name` |
# | `arrived`, and both results | `[microbatch_size, ...]`, varying over `axis_name` |
# | communication | one `ppermute` per tick; any other collective: none |
#
# `axis_name` has any number of stages, 1 included. `check` looks at every tick of a schedule, at the outputs, and at
# gradients: of the weights of each stage, of the microbatches, and of `arrived`.
#
# Useful: `lax.axis_index`, `lax.axis_size`, `jnp.clip`, `jnp.where`, `lax.ppermute`.


# %%
# --8<-- [start:tick_signature]
def pipeline_tick(
    stage: Callable[[jax.Array, jax.Array], jax.Array],
    microbatches: jax.Array,
    arrived: jax.Array,
    tick: jax.Array,
    axis_name: str,
) -> tuple[jax.Array, jax.Array]:
    # --8<-- [end:tick_signature]
    """Run one tick of this stage. Runs inside ``shard_map``.

    Args:
        stage: ``(x, microbatch) -> y`` of the same shape; never communicates over ``axis_name``.
        microbatches: The pipeline's input, ``[num_microbatches, microbatch_size, ...]``.
        arrived: The previous stage's output in the last tick, ``[microbatch_size, ...]``.
        tick: The tick's number, a scalar.
        axis_name: The mesh axis of the stages.

    Returns:
        ``(y, sent)``: this stage's output, and the input that it has been sent for its next tick.
    """
    ### BEGIN SOLUTION
    number, num_stages = lax.axis_index(axis_name), lax.axis_size(axis_name)
    entering = microbatches[jnp.clip(tick, 0, microbatches.shape[0] - 1)]
    y = stage(jnp.where(number == 0, entering, arrived), tick - number)
    return y, lax.ppermute(y, axis_name, [(i, i + 1) for i in range(num_stages - 1)])
    ### END SOLUTION


# %% [markdown]
# ## All ticks: `execute_pipeline`
#
# Draw a table with a row for each of 3 stages and a column for each tick, and write the number of the microbatch in
# every cell, for 4 microbatches. Then compare:

# %%
if __name__ == "__main__":
    print("tick     0  1  2  3  4  5")
    for stage_number, row in enumerate(["0  1  2  3  .  .", ".  0  1  2  3  .", ".  .  0  1  2  3"]):
        print(f"stage {stage_number}  {row}")

# %% [markdown]
# Each stage has work in as many ticks as there are microbatches. The other ticks are the bubble. How many ticks are
# there for `S` stages and `M` microbatches, and in which ones does the last stage finish a microbatch? Your function
# must work for any `S` and `M`, including fewer microbatches than stages, where no tick has work for all stages. No
# garbage may reach a result, not even multiplied by zero: in a test case without gradients, `check`'s stages return NaN
# for a microbatch that does not exist, and zero times NaN is NaN.
#
# | budget | |
# |---|---|
# | bubble, for 8 stages and 5 microbatches | 7/12 of the devices' time, within 1% |
# | `ppermute` | at most one per tick, and one for its gradient |
# | any other collective | none: activations are never gathered |
#
# The result is `[num_microbatches, microbatch_size, ...]` in the order of the microbatches. Only the last stage's
# result counts: the others may return anything of that shape.
#
# Useful: `lax.scan` over ticks. In the first tick nothing has been sent yet, but the initial value of `arrived` must
# have the same type as later ones, varying over `axis_name`: `jnp.zeros_like` of a microbatch has this type,
# `jnp.zeros` does not.


# %%
def execute_pipeline(
    stage: Callable[[jax.Array, jax.Array], jax.Array], microbatches: jax.Array, axis_name: str
) -> jax.Array:
    """Run all microbatches through all stages. Runs inside ``shard_map``.

    Args:
        stage: ``(x, microbatch) -> y`` of the same shape; never communicates over ``axis_name``.
        microbatches: The pipeline's input, ``[num_microbatches, microbatch_size, ...]``; varies over ``axis_name``.
        axis_name: The mesh axis of the stages.

    Returns:
        On the last stage, its output for each microbatch, like ``microbatches``; on the others, anything of that shape.
    """
    ### BEGIN SOLUTION
    num_stages, num_microbatches = lax.axis_size(axis_name), microbatches.shape[0]

    def step(arrived, tick):
        y, sent = pipeline_tick(stage, microbatches, arrived, tick, axis_name)
        return sent, y

    ticks = jnp.arange(num_microbatches + num_stages - 1)
    _, outputs = lax.scan(step, jnp.zeros_like(microbatches[0]), ticks)
    return outputs[num_stages - 1 :]
    ### END SOLUTION


# %% [markdown]
# ## A model: `pipeline_loss`
#
# A model is an embedding, layers and a head. Each stage holds `num_layers / num_stages` of the layers, in order: stage
# 0 the first ones, stage 1 the next ones, and so on. The embedding and the head are small compared with the layers, and
# every stage holds a copy of both. It is simplest to embed all rows on every stage, with
# `model.embed(params["embed"], batch["inputs"])`, though only the first stage's are used, and to compute the loss on
# every stage, though only the last stage's counts.
#
# Padding must not count: `batch["mask"]` is 1 for each row (of an MLP's batch) or token (of a Transformer's) that
# counts, and 0 elsewhere. `model.loss(params["head"], x, targets, mask)` is the mean over the unmasked part, and 0 if
# everything is masked. The loss that you return is that mean over **all** rows, **the same on every stage**. It is not
# the mean of the parts' means, since parts may have different unmasked counts.
#
# The gradient is where things go wrong. Suppose that a weight `w` is 1 everywhere, that the last of four stages has the
# loss `3 w`, and that the others get it with an all-gather:

# %%
if __name__ == "__main__":

    def gathered(w):
        """Return the last stage's loss on every stage."""
        return lax.all_gather(3 * w, "pipe")[-1]

    gradients = jax.shard_map(
        lambda w: jax.grad(lambda w: gathered(w[0]))(w),
        mesh=make_mesh({"pipe": 4}),
        in_specs=P("pipe"),
        out_specs=P("pipe"),
    )(jnp.ones(4))
    print("d(3 w)/dw on each stage:", gradients)

# %% [markdown]
# The loss is right on every stage, but the gradient is four times too large. Each device differentiates the number that
# *it* returns, four devices return it, and the gather's transpose adds up the four gradients. A number that is typed as
# the same everywhere is differentiated once.
#
# - `params["embed"]` and `params["head"]` are whole; leaves under `layers` are `[num_layers/pipe, ...]`. On entry, all
#   vary over `axis_name`. So each stage's gradient of embedding and head is its own share of the whole gradient, zero
#   if it does not contribute: `check` adds the shares up, and so will your training step.
# - Layers are numbered from 0 through the whole model, not per stage. For microbatch `m` and layer `l`, call
#   `model.layer(layer_params, x, key)` with the key `layer_key(key, m, l)`. So dropout masks are the same as on one
#   device, whatever the order in which stages compute.
# - Reject a number of layers that the stages do not divide: raise a `ValueError` that names both numbers,
#   `model.num_layers` and the stages.
#
# | budget | |
# |---|---|
# | `ppermute` | as in `execute_pipeline`, forward and backward |
# | any other collectives | together at most `2 (S-1)/S` of the bytes of all outputs; scalars are negligible |
# | stretch goal (no points): FLOPs, 8 stages, 32,768 outputs | at most 0.65 times those of a whole loss per stage |
#
# If `S` does not divide the rows, they count as padded to a multiple of `S`.
#
# The last row is a stretch goal. With a large vocabulary the head costs as much as several layers, and all stages but
# one compute it in vain. Make the plain version work first. Then let each stage compute the loss of `1/S` of the rows,
# if `S` divides them.
#
# Useful: `lax.scan` over the layers of a stage, `lax.psum`, `lax.pmean`; for the stretch goal `lax.psum_scatter`.


# %%
def pipeline_loss(
    params: PyTree, batch: dict[str, jax.Array], key: jax.Array, model: Model, num_microbatches: int, axis_name: str
) -> jax.Array:
    """Compute the mean loss of a batch over the stages of a model. Runs inside ``shard_map``.

    Args:
        params: ``embed`` and ``head`` whole, ``layers`` with leaves ``[num_layers/pipe, ...]``; all varying over
            ``axis_name``.
        batch: ``inputs``, ``targets`` and ``mask``, ``[rows, ...]``, the same on every stage.
        key: For dropout, the same on every stage.
        model: The model's pure functions.
        num_microbatches: Number of microbatches that the rows are split into.
        axis_name: The mesh axis of the stages.

    Returns:
        The mean over all unmasked rows or tokens, a scalar, the same on every stage; 0 if everything is masked.

    Raises:
        ValueError: The layers cannot be split evenly; the message names both numbers.
    """
    ### BEGIN SOLUTION
    number, num_stages = lax.axis_index(axis_name), lax.axis_size(axis_name)
    per_stage, rest = divmod(model.num_layers, num_stages)
    if rest:
        raise ValueError(f"{model.num_layers} layers cannot be shared out evenly over {num_stages} stages")

    @jax.checkpoint
    def stage(x, microbatch):
        def layer(x, numbered):
            index, weights = numbered
            return model.layer(weights, x, layer_key(key, microbatch, index)), None

        own = number * per_stage + jnp.arange(per_stage)
        return lax.scan(layer, x, (own, params["layers"]))[0]

    x = model.embed(params["embed"], batch["inputs"])
    y = execute_pipeline(stage, split_microbatches(x, num_microbatches), axis_name).reshape(x.shape)
    last, rows = number == num_stages - 1, y.shape[0]
    if rows % num_stages:
        loss = model.loss(params["head"], y, batch["targets"], batch["mask"])
        return lax.psum(jnp.where(last, loss, 0.0), axis_name)
    own = lax.psum_scatter(jnp.where(last, y, 0.0), axis_name, tiled=True)
    part = {name: lax.dynamic_slice_in_dim(batch[name], number * len(own), len(own)) for name in ("targets", "mask")}
    share = jnp.sum(part["mask"]) / jnp.maximum(jnp.sum(batch["mask"]), 1)
    return lax.psum(share * model.loss(params["head"], own, part["targets"], part["mask"]), axis_name)
    ### END SOLUTION


# %% [markdown]
# ## The whole step: `pipeline_train_step`
#
# Several pipelines run in parallel: each index along `data_axis` has its own rows, and a copy of every stage.
#
# What has to be kept for the backward pass? For every tick, everything that its layers need there. Here are the numbers
# for a stage of 2 layers of width 512 and hidden size 2,048, with 1,024 rows in a microbatch and 32 microbatches on 4
# stages, the size that you are graded on:

# %%
if __name__ == "__main__":
    ticks, block, hidden = 32 + 4 - 1, 1024 * 512 * 4 / 2**20, 1024 * 2048 * 4 / 2**20
    kept = 2 * (6 * hidden + 2 * block)  # about, for two layers: six arrays of the hidden size, and two blocks
    print(f"input of a stage in one tick: {block:.0f} MiB; in all {ticks} ticks {ticks * block:.0f} MiB")
    print(f"kept by its layers in one tick: {kept:.0f} MiB; in all {ticks} ticks {ticks * kept:.0f} MiB")

# %% [markdown]
# So keep only a stage's *input*, and let the backward pass of a tick recompute its layers. You can do this in
# `pipeline_loss`, or pass it a model whose layers do it themselves: `replace(model, layer=...)`, from `dataclasses`,
# creates one.
#
# This function is the whole step, by plain SGD (`leaf - learning_rate * gradient`):
# - On entry, every leaf of `params` varies over both axes.
# - Which device has which part of a gradient? A stage's layers belong only to that stage, and its copies along
#   `data_axis` have seen different rows. The embedding and the head are the same on all devices, and each stage has a
#   share of their gradient.
# - `key` is the same on every device. Index `i` along `data_axis` uses `fold_in(key, i)`, the result of
#   `fold_key_over_axes(key, (data_axis,))` from the chapter `data_parallel`.
# - The returned loss is the mean over all unmasked rows or tokens on all devices, the same everywhere, and gradients
#   are those of this mean. Pipelines may have different unmasked counts, some of them zero.
#
# | budget | |
# |---|---|
# | live temporaries | at most 3 blocks per tick, 2 per microbatch, twice a stage's gradients, one stage's residuals |
# | all-reduce | over `data_axis` once: each leaf, the count, the loss; over `pipe_axis` once: embedding, head, loss |
# | `ppermute` | as in `pipeline_loss`: recomputing a stage sends nothing |
# | any other collectives | as in `pipeline_loss` |
#
# A stage's residuals count as eight arrays of the width and eight of the hidden size for each of its layers.
#
# A block is the activations of one microbatch. In numbers, at the size above: at most 530 MiB of temporaries.
# Parameters after one step and after three must equal those of a single device. `check` also compares the update
# divided by `learning_rate`, which is your gradient, leaf by leaf.
#
# Useful: `jax.value_and_grad`, `lax.psum`, `jax.checkpoint`.


# %%
def pipeline_train_step(
    params: PyTree,
    batch: dict[str, jax.Array],
    key: jax.Array,
    model: Model,
    num_microbatches: int,
    pipe_axis: str,
    data_axis: str,
    learning_rate: jax.Array,
) -> tuple[PyTree, jax.Array]:
    """Take one step of SGD on parallel pipelines. Runs inside ``shard_map``.

    Args:
        params: As for ``pipeline_loss``, all varying over both axes.
        batch: This pipeline's rows, ``inputs``, ``targets`` and ``mask``, ``[batch/data, ...]``.
        key: For dropout, the same on every device.
        model: The model's pure functions.
        num_microbatches: Number of microbatches that a pipeline's rows are split into.
        pipe_axis: The mesh axis of the stages.
        data_axis: The mesh axis along which the batch is split.
        learning_rate: A scalar.

    Returns:
        ``(params, loss)``: updated parameters, and the mean loss over all unmasked rows or tokens, the same everywhere.
    """
    ### BEGIN SOLUTION
    key = fold_key_over_axes(key, (data_axis,))
    counted = jnp.sum(batch["mask"])
    share = counted / lax.psum(counted, data_axis)

    def loss_of(params):
        return share * pipeline_loss(params, batch, key, model, num_microbatches, pipe_axis)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    ends = lax.psum({"embed": gradients["embed"], "head": gradients["head"]}, pipe_axis)
    gradients = lax.psum({**gradients, **ends}, data_axis)
    updated = jax.tree.map(lambda leaf, gradient: leaf - learning_rate * gradient, params, gradients)
    return updated, lax.psum(loss, data_axis)
    ### END SOLUTION


# %% [markdown]
# ## In your own words
#
# A colleague has 8 stages and 8 microbatches, and finds the bubble too large. "Then I will use twice as many
# microbatches, each half as large. The batch stays the same, so this costs nothing." Say what happens to the bubble, to
# the memory that activations take, and to the communication, and name one thing that does cost something. Two formulas
# are enough.

# %% [markdown]
# ### BEGIN SOLUTION
# The bubble is `(S-1)/(M+S-1)`: 7/15 = 0.47 before and 7/23 = 0.30 after. A stage keeps its input in each of
# `M + S - 1` ticks, and a block is half as large: 15 blocks before, 23 half-blocks after, so the memory shrinks a
# little. The bytes sent hardly change either, twice as many messages of half the size, but the latency of each counts
# more. The real cost is that matmuls get smaller: half as many rows use a device less efficiently, and a stage's
# weights are read from memory for every microbatch, whatever its size. Beyond some number of microbatches a tick no
# longer takes half as long, and the gain is gone.
# ### END SOLUTION

# %% [markdown]
# ## Lab: the same losses everywhere, dropout included
#
# Here a Transformer with dropout trains on one device and on three meshes, with six microbatches on each. With
# `data=1`, dropout masks are the same as on one device. With `data=2`, the two pipelines have different microbatches
# and keys, so different masks, and losses that differ a little. Compiling the four programs takes about 20 seconds.

# %%
if __name__ == "__main__":
    model = transformer(width=32, hidden=64, num_layers=8, num_heads=2, vocab=64, max_seq=16, dropout=0.1)
    params = jax.jit(model.init)(jax.random.key(0))
    no_padding = {"mask": np.ones((24, 16), np.float32)}
    batches = [token_batch(0, i, batch=24, seq=16, vocab=64) | no_padding for i in range(6)]
    stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *batches)
    specs = {name: P("pipe") if name == "layers" else P() for name in params}

    def train(mesh):
        def local(params, batches):
            def one(params, numbered):
                number, batch = numbered
                key = jax.random.fold_in(jax.random.key(1), number)
                return pipeline_train_step(params, batch, key, model, 6, "pipe", "data", jnp.float32(0.5))

            params = jax.tree.map(lambda leaf: as_varying(as_varying(leaf, "pipe"), "data"), params)
            return lax.scan(one, params, (jnp.arange(6), batches))[1]

        mapped = jax.shard_map(local, mesh=mesh, in_specs=(specs, P(None, "data")), out_specs=P())
        return jax.jit(mapped)(params, stacked)

    @jax.jit
    def plain_step(params, number, batch):
        """Take a step on one device, each microbatch with its own key."""
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(1), number), 0)

        def loss_of(params):
            parts, keys = split_microbatches(batch, 6), jax.vmap(lambda m: jax.random.fold_in(key, m))(jnp.arange(6))
            return jax.vmap(lambda part, key: full_loss(model, params, part, key))(parts, keys).mean()

        loss, gradients = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients), loss

    runs = {
        f"data={data} x pipe={pipe}": train(make_mesh({"data": data, "pipe": pipe}))
        for data, pipe in ((1, 1), (1, 8), (2, 4))
    }
    plain = params
    print("step   one device", *(f"{name:>17}" for name in runs))
    for i, batch in enumerate(batches):
        plain, loss = plain_step(plain, i, batch)
        print(f"{i:4}   {loss:10.5f}", *(f"{losses[i]:17.5f}" for losses in runs.values()))

# %% [markdown]
# ## Lab: two ways to spend a bubble
#
# Your idle stages compute garbage. They could also do nothing: `lax.cond` runs one of two branches, and a stage that
# takes the empty branch waits. Neither your tick nor your schedule has to change, since the stage is an argument:

# %%
if __name__ == "__main__":
    S, M, rows, width = 8, 8, 512, 2048

    def program(idle_does_nothing):
        def local(weights, microbatches):
            def stage(x, microbatch):
                return jnp.tanh(x @ weights[0])

            def skipping(x, microbatch):
                has_work = (microbatch >= 0) & (microbatch < M)
                return lax.cond(has_work, lambda x: stage(x, microbatch), lambda x: x, x)

            own = as_varying(microbatches, "pipe")
            return execute_pipeline(skipping if idle_does_nothing else stage, own, "pipe")[None]

        mapped = jax.shard_map(local, mesh=abstract_mesh({"pipe": S}), in_specs=(P("pipe"), P()), out_specs=P("pipe"))
        inputs = {
            "weights": jax.ShapeDtypeStruct((S, width, width), np.float32),
            "microbatches": jax.ShapeDtypeStruct((M, rows, width), np.float32),
        }
        run = lambda weights, microbatches: {"outputs": mapped(weights, microbatches)}  # noqa: E731
        return export(
            run, inputs, {"weights": P("pipe"), "microbatches": P()}, mesh={"pipe": S}, out_specs={"outputs": P("pipe")}
        )

    for name, idle_does_nothing in (("useless work", False), ("nothing", True)):
        prediction = predict(program(idle_does_nothing), "8xH100")
        microseconds = 1e6 * prediction.timeline.seconds
        print(f"idle stages do {name}: {prediction.costs.flops:.3g} FLOPs per device, {microseconds:.0f} us")

# %% [markdown]
# The step takes just as long, with about half the FLOPs: the bubble costs time whether or not idle stages work. Doing
# nothing saves only energy.
#
# ## Lab: a schedule by hand, and yours
#
# Take a sheet of paper and draw a row for each of 4 stages, a column for each tick, and the numbers of 6 microbatches
# in the cells. Then compare. The first picture shows the schedule written in this cell, one string per stage, with `F3`
# for the forward pass of microbatch 3; change it, and see which orders cost ticks. The second is read off your
# program's timeline on a machine where only matmuls take time, with the garbage that idle stages compute in grey.

# %%
if __name__ == "__main__":
    S, M = 4, 6
    by_hand = written(["F0 F1 F2 F3 F4 F5"] * S)
    yours = predict(program(idle_does_nothing=False), "free network").timeline
    display(HTML(schedule_svg(by_hand)), HTML(schedule_svg(yours, forwards(gpipe(S, M)))))

# %% [markdown]
# ## Lab: where the time goes
#
# Finally, your step on 2 x 4 H100s, forward and backward, with 8 microbatches: look for the staircases at both ends. In
# the first picture idle stages compute garbage, so they count as busy; the next picture shows this in grey. Backward
# ticks are about eight times as long as forward ones, not three: with 256 rows, a good part of each goes into adding up
# the gradients of the weights, which takes the same time for any number of rows.

# %%
if __name__ == "__main__":
    deep = mlp(width=2048, hidden=8192, num_layers=8, num_inputs=512, num_outputs=512)
    shapes = jax.eval_shape(lambda: deep.init(jax.random.key(0)))
    tree_specs = {name: jax.tree.map(lambda _, n=name: specs[n], tree) for name, tree in shapes.items()}

    def one_step(params, batch):
        params = jax.tree.map(lambda leaf: as_varying(as_varying(leaf, "pipe"), "data"), params)
        key, rate = jax.random.key(0), jnp.float32(0.01)
        updated, loss = pipeline_train_step(params, batch, key, deep, 8, "pipe", "data", rate)
        ends = {name: jax.tree.map(lambda leaf: leaf[None], updated[name]) for name in ("embed", "head")}
        return {"params": jax.tree.map(lambda leaf: leaf[None], {**updated, **ends}), "loss": loss}

    rows, counts = (jax.ShapeDtypeStruct((2 * 8 * 256, *dims), np.float32) for dims in ((512,), ()))
    # Every device returns its own copy: a leaf's type still says "varying".
    out_specs = {"params": P("data", "pipe"), "loss": P()}
    mapped = jax.shard_map(
        one_step, mesh=abstract_mesh({"data": 2, "pipe": 4}), in_specs=(tree_specs, P("data")), out_specs=out_specs
    )
    step = export(
        lambda params, batch: mapped(params, batch),
        {"params": shapes, "batch": {"inputs": rows, "targets": rows, "mask": counts}},
        {"params": tree_specs, "batch": P("data")},
        mesh={"data": 2, "pipe": 4},
        out_specs=out_specs,
    )
    prediction = predict(step, machine("8xH100"))
    for name, figure in prediction.figures().items():
        print(f"{name:24} {figure}")
    prediction  # noqa: B018  a notebook shows it as a picture

# %%
if __name__ == "__main__":
    display(HTML(schedule_svg(prediction.timeline, gpipe(4, 8))))

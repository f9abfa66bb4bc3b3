# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Looping pipelines
#
# In a pipeline of `S` stages, `S - 1` ticks pass before the last stage has anything to do. The fewer layers per stage,
# the shorter each tick, and the sooner the last stage starts. But fewer layers per stage means more stages, and the
# number of devices is limited.
#
# The solution is for each device to hold *several* small groups of layers. A microbatch then goes round the devices
# several times: through the first group on each, then through the second group on each, and so on. The initial wait
# takes as many ticks as before, but each tick is shorter. Breadth-first means that all microbatches finish a round
# before the next one begins.
#
# You will write it in four functions:
#
# | function | what it does |
# |---|---|
# | `layers_of_stage` | returns the layers that a device holds |
# | `loop_position` | returns the microbatch and repeat that a device works on at a tick |
# | `execute_looping_pipeline` | runs the schedule, for any number of stages, microbatches and repeats |
# | `looping_train_step` | trains: a repeat's gradients are averaged while earlier repeats still run backward |

# %%
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from course.data import regression_batch
from course.machines import machine
from course.mesh import abstract_mesh, as_varying, make_mesh
from course.model import Model, layer_key, mlp
from course.predict import predict
from course.program import export
from course.train import make_train_step
from solutions.data_parallel import fold_key_over_axes

PyTree = Any

# %% [markdown]
# ## Assigning layers: `layers_of_stage`
#
# A *stage* is a position along the axis `pipe`. With `num_repeats` rounds, each stage holds `num_repeats` groups of
# layers of the same size; the layers within a group are consecutive in the model. In its first round, a microbatch goes
# through the first group of stage 0, the first group of stage 1, and so on to the last stage. Then it returns to stage
# 0 for the second round. Altogether, it must go through the layers in their order in the model, 0, 1, 2, ..., as on one
# device.
#
# Return a tuple with one tuple of layer numbers for each repeat. If the layers cannot be split evenly, raise a
# `ValueError` whose message says how many layers there are: a function that silently drops layers trains a different
# model, and nobody notices.
#
# These are Python numbers; no JAX is needed.


# %%
def layers_of_stage(stage: int, num_stages: int, num_repeats: int, num_layers: int) -> tuple[tuple[int, ...], ...]:
    """List the layers that a stage holds.

    Args:
        stage: The index along the axis, from 0.
        num_stages: Number of stages.
        num_repeats: Number of times a microbatch passes each stage.
        num_layers: Number of layers of the whole model.

    Returns:
        One tuple for each repeat: the numbers of the layers that the stage computes in it, in order.

    Raises:
        ValueError: The layers cannot be split evenly; the message says how many there are.
    """
    ### BEGIN SOLUTION
    visits = num_stages * num_repeats
    if num_layers % visits:
        raise ValueError(
            f"{num_layers} layers cannot be shared evenly by {num_stages} stages in {num_repeats} repeats: "
            f"their number must be a multiple of {visits}"
        )
    each = num_layers // visits
    first = [(repeat * num_stages + stage) * each for repeat in range(num_repeats)]
    return tuple(tuple(range(start, start + each)) for start in first)
    ### END SOLUTION


# %% [markdown]
# ## The schedule: `loop_position`
#
# Time is counted in *ticks*: in each tick a stage computes one of its groups of layers for one microbatch, and passes
# the result on to the next stage, the last stage to stage 0. The rules of the breadth-first schedule:
# - Stage 0 takes the microbatches of a repeat in order, one per tick, starting at tick 0.
# - Whatever a stage works on at one tick, the next stage works on at the next tick.
# - A repeat begins when all microbatches of the previous repeat have entered stage 0, *and* the first of them has
#   returned to it. Microbatches that return earlier wait at stage 0.
#
# Draw it for 2 stages, 3 microbatches and two repeats, with ticks from left to right. To start with, here is a plain
# pipeline of the same size:

# %%
if __name__ == "__main__":
    for stage in range(2):
        row = ["." if not 0 <= tick - stage < 3 else str(tick - stage) for tick in range(8)]
        print(f"stage {stage}:", " ".join(row))

# %% [markdown]
# There are two cases to distinguish: more microbatches than stages, and fewer. Draw one of each, with 2 stages and 3
# microbatches, and with 4 stages and 2 microbatches. In which case does a microbatch wait for the stage, and in which
# does the stage wait for a microbatch?
#
# `loop_position` returns `(microbatch, repeat)`, or `None` for a tick in which the stage has nothing to do. It is
# called for every tick and every stage, and for ticks after the end.


# %%
def loop_position(
    tick: int, stage: int, num_stages: int, num_microbatches: int, num_repeats: int
) -> tuple[int, int] | None:
    """Find the work of a stage at a tick of the breadth-first schedule.

    Args:
        tick: The tick's number; stage 0 begins at tick 0.
        stage: The index along the axis, from 0.
        num_stages: Number of stages.
        num_microbatches: Number of parts of the batch; may be any number.
        num_repeats: Number of times each of them passes each stage.

    Returns:
        ``(microbatch, repeat)``, both from 0; None if the stage is idle.
    """
    ### BEGIN SOLUTION
    if tick < stage:
        return None
    repeat, microbatch = divmod(tick - stage, max(num_microbatches, num_stages))
    return (microbatch, repeat) if microbatch < num_microbatches and repeat < num_repeats else None
    ### END SOLUTION


# %% [markdown]
# ## Run it: `execute_looping_pipeline`
#
# Now run it on the devices, inside `jax.shard_map`. Every device runs the same program and finds its index with
# `lax.axis_index`. `stage(x, microbatch, repeat)` computes one group of layers on the calling device: `repeat` selects
# the weights, and both numbers select the dropout masks. `x` and its result have the shape of a microbatch,
# `[microbatch_size, ...]`; `microbatch` and `repeat` are scalars, and may be traced, as in a `lax.scan` over ticks.
# `stage` does not communicate.
#
# - Stage 0's input is `microbatches` in the first repeat, and the last stage's output in later ones. Activations that
#   arrive there early must be kept until their turn comes. The other stages take the activations that have just
#   arrived.
# - A stage may compute garbage in idle ticks, or skip them with `lax.cond`; both take the same time. No garbage may
#   reach a result, not even multiplied by zero: in a test case without gradients, `check`'s stages return NaN for a
#   microbatch or a repeat that does not exist, and zero times NaN is NaN.
# - Return `[num_microbatches, microbatch_size, ...]`: the output of the *last* stage in the last repeat, in the order
#   of the microbatches. The other stages return any array of that shape.
# - Everything must be differentiable, and `axis_name` may have any size, including 1.
#
# | budget | |
# |---|---|
# | bubble, with a free network | `1 - R*M/T` within 1%, with `T = (R-1)*max(M,S) + M + S - 1` ticks |
# | bytes permuted, forward and backward each | at most one microbatch per tick |
# | any other collective | none |
#
# `S` is the number of stages, `M` of microbatches, `R` of repeats. The test cases have `M` above, equal to and below
# `S`, and `M` that is not a multiple of `S`. How large is the bubble with and without looping?

# %%
if __name__ == "__main__":
    print("stages  microbatches   R=1     R=2     R=4")
    for stages, microbatches in ((4, 16), (4, 4), (8, 8), (8, 2)):
        shares = []
        for repeats in (1, 2, 4):
            ticks = (repeats - 1) * max(microbatches, stages) + microbatches + stages - 1
            shares.append(1 - repeats * microbatches / ticks)
        print(f"{stages:6}{microbatches:14}", *(f"{share:7.1%}" for share in shares))

# %% [markdown]
# `lax.ppermute(x, axis_name, [(0, 1), (1, 2), (2, 0)])` sends along a ring of three. The carry of a `lax.scan` keeps
# its type: the stages' results vary over `axis_name`, and so does the argument `microbatches`.
#
# Useful: `lax.scan`, `lax.ppermute`, `jnp.where(index == 0, ..., ...)`, `array.at[i].set(...)`, and `loop_position`'s
# arithmetic, with `jnp.clip` in place of `None`.


# %%
def execute_looping_pipeline(
    stage: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    microbatches: jax.Array,
    num_repeats: int,
    axis_name: str,
) -> jax.Array:
    """Run microbatches through all stages ``num_repeats`` times, breadth-first. Runs inside ``shard_map``.

    Args:
        stage: ``(x, microbatch, repeat) -> y``: this device's layers of a repeat; ``x`` and ``y``
            ``[microbatch_size, ...]``.
        microbatches: Inputs of the first layer, ``[num_microbatches, microbatch_size, ...]``, varying over
            ``axis_name``; only those on stage 0 are used.
        num_repeats: Number of times a microbatch passes each stage.
        axis_name: The mesh axis of the stages.

    Returns:
        ``[num_microbatches, microbatch_size, ...]``: on the last stage the outputs of the last layer.
    """
    ### BEGIN SOLUTION
    num_microbatches, num_stages, index = len(microbatches), lax.axis_size(axis_name), lax.axis_index(axis_name)
    period = max(num_microbatches, num_stages)
    num_ticks = (num_repeats - 1) * period + num_microbatches + num_stages - 1
    ring = [(i, (i + 1) % num_stages) for i in range(num_stages)]

    def tick(carry, t):
        waiting, arrived = carry
        # A microbatch that returns to stage 0 left it num_stages ticks ago; it waits in its slot for its next repeat.
        back = (t - num_stages) % period
        slot = jnp.minimum(back, num_microbatches - 1)
        returned = (t >= num_stages) & (back < num_microbatches)
        waiting = waiting.at[slot].set(jnp.where(returned, arrived, waiting[slot]))
        since = jnp.maximum(t - index, 0)
        microbatch = jnp.minimum(since % period, num_microbatches - 1)
        repeat = jnp.minimum(since // period, num_repeats - 1)
        y = stage(jnp.where(index == 0, waiting[microbatch], arrived), microbatch, repeat)
        return (waiting, lax.ppermute(y, axis_name, ring)), y

    start = microbatches, jnp.zeros_like(microbatches[0])
    _, outputs = lax.scan(tick, start, jnp.arange(num_ticks))
    return outputs[-num_microbatches:]
    ### END SOLUTION


# %% [markdown]
# ## Overlapping averages with earlier repeats: `looping_train_step`
#
# On a mesh with the axes `data` and `pipe`, every group of devices along `pipe` is a separate pipeline that works on
# its own rows. After the backward pass, the gradients of all layers are averaged over `data`. That is a long transfer
# at a time when nothing is left to compute.
#
# The backward pass of a looping pipeline goes through the repeats one after the other, the last one first. When a
# repeat's last backward tick is over on all stages, its gradients are complete, and could be averaged while *earlier*
# repeats are still running backward. Only those of repeat 0 have nothing left to hide behind. How long does each part
# take? For a group of one layer of width 2,048 and hidden size 8,192 on 8 A5000s, 4 pipelines of 2 stages, with 4
# microbatches of 512 rows:

# %%
if __name__ == "__main__":
    a5000, weights = machine("8xA5000"), 2 * 2048 * 8192
    matmuls = 3 * 2 * 512 * weights / (a5000.peak("f32") * a5000.efficiency.matmul)
    average = 2 * 3 / 4 * 4 * weights / min(link.bandwidth for link in a5000.links)
    print(f"backward tick, with recomputation: {1e3 * matmuls:.1f} ms; 4 of them: {4e3 * matmuls:.1f} ms")
    print(f"average of one repeat's gradients over data: {1e3 * average:.1f} ms; of four: {4e3 * average:.1f} ms")

# %% [markdown]
# JAX's derivative of **one** scan over all ticks returns the gradients of all repeats together, at its end. So split
# the ticks into blocks, one for each repeat: `max(M, S)` ticks each, and all remaining ticks in the last block. In the
# first ticks of a block, the later stages have not started its repeat: at the block's local tick `j`, stages with an
# index above `j` are still working on the previous repeat. So a block needs the weights of two repeats, and once the
# backward pass has left block `b`, the gradients of repeat `b` are complete everywhere.
#
# Where in the backward pass is the average taken? Wherever you put it: with `jax.custom_vjp`, a function that returns
# its argument unchanged may do anything in the backward pass. Pass the weights of a repeat through such a function
# before the first block that uses them, and its incoming gradient is that repeat's whole gradient. Its backward rule
# has to return a value that varies like the argument, but a sum over an axis no longer varies along it: see
# `as_varying`.
#
# The timeline's rules, once more: computations run in program order; a transfer begins when its operand is ready, and
# overlaps with whatever is computed next; a loop iteration ends when its computations and its transfers have ended; a
# transfer outside a loop may overlap with it. Joining leaves into one piece is a computation too. In the backward pass
# it runs at the place that mirrors where you split that piece. Details of the step:
#
# - `params["layers"]` has this stage's layers, `[num_repeats, layers_per_stage, ...]`, in the order of
#   `layers_of_stage`. `params["embed"]` and `params["head"]` are whole on every device. **All leaves vary over both
#   axes**: no gradient is reduced unless you say so.
# - `batch` has the rows of this device's pipeline, the same on all its stages. Split them into `num_microbatches` equal
#   parts, in order.
# - Stage 0 embeds (`model.embed(params["embed"], inputs)`), and the last stage computes the loss,
#   `model.loss(params["head"], x, targets, mask)`. `batch["mask"]` is 1 for each row (of an MLP's batch) or token (of a
#   Transformer's) that counts, and 0 for padding; the loss is the mean over the unmasked part, and 0 if everything is
#   masked.
# - `key` is the same on every device. Index `i` along `data_axis` uses `fold_in(key, i)`, the result of
#   `fold_key_over_axes(key, (data_axis,))` from the chapter `data_parallel`, and layer number `l` of the model computes
#   microbatch `m` as `model.layer(weights, x, layer_key(key, m, l))`. So dropout masks are the same as on one device,
#   and in every recomputation.
# - Recompute each tick's layers in the backward pass (`jax.checkpoint`), and keep only the tick's input. All inputs of
#   the function that you wrap are kept: if you *select* a group of weights before the call, it is an input, too.
# - Update by plain SGD, `p - learning_rate * gradient`, with the gradient of the mean loss over all unmasked rows or
#   tokens in all pipelines; some pipelines may have none. The gradients of embedding and head come from one stage and
#   are needed on all stages. Return the parameters and that loss, the same on every device.
#
# | budget | |
# |---|---|
# | exposed over `data`, on 8 A5000s | at most 0.5 times that of one average after the backward pass |
# | FLOPs | at most 9/7 of the reference's: recompute a tick's layers once, not twice |
# | live temporaries | at most 1.5 times the reference's |
# | all-reduce | gradients and two scalars once over `data`, leaf by leaf or in larger pieces |
# | all-reduce over `pipe` | embedding, head and a scalar once |
# | bytes permuted over `pipe` | at most one microbatch per tick, forward and backward |
# | any other collective | none |
#
# The size is that of the example above, with 4 repeats. The time exposed over `data` is the step time less that of the
# same step with free links on that axis.
#
# Useful: `jax.tree.map`, a Python loop over repeats around a `lax.scan` over ticks, `lax.psum` over one axis or
# several. If you scale each pipeline's loss by its share *before* differentiating, every reduction is a plain sum.


# %%
def looping_train_step(
    params: PyTree,
    batch: dict[str, jax.Array],
    key: jax.Array,
    model: Model,
    num_microbatches: int,
    pipe_axis: str,
    data_axis: str,
    learning_rate: jax.Array,
) -> tuple[PyTree, jax.Array]:
    """Take one step of SGD, averaging gradients during earlier repeats' backward pass. Runs inside ``shard_map``.

    Args:
        params: Whole ``embed`` and ``head``, and this stage's ``layers``, ``[num_repeats, layers_per_stage, ...]``; all
            of them vary over both axes.
        batch: The rows of this device's pipeline, ``inputs``, ``targets`` and ``mask``, ``[batch/data, ...]``.
        key: For dropout, the same on every device.
        model: The model's pure functions.
        num_microbatches: Number of parts to split the rows into; divides the number of rows.
        pipe_axis: The mesh axis of the stages.
        data_axis: The mesh axis of the pipelines.
        learning_rate: A scalar.

    Returns:
        ``(params, loss)``: updated parameters, and the mean loss over all unmasked rows or tokens, the same everywhere.
    """
    ### BEGIN SOLUTION
    key = fold_key_over_axes(key, (data_axis,))
    num_stages, index = lax.axis_size(pipe_axis), lax.axis_index(pipe_axis)
    num_repeats, layers_per_stage = jax.tree.leaves(params["layers"])[0].shape[:2]
    period = max(num_microbatches, num_stages)
    ring = [(i, (i + 1) % num_stages) for i in range(num_stages)]
    counted = jnp.sum(batch["mask"])
    share = counted / lax.psum(counted, data_axis)

    @jax.custom_vjp
    def entering(weights):
        return weights

    def summed(_, gradients):
        return (jax.tree.map(lambda g: as_varying(lax.psum(g, data_axis), data_axis), gradients),)

    entering.defvjp(lambda weights: (weights, None), summed)

    def stage(weights, x, microbatch, repeat):
        # A group is small: when unrolled, its last product is not recomputed needlessly.
        for j in range(layers_per_stage):
            number = (repeat * num_stages + index) * layers_per_stage + j
            one = jax.tree.map(lambda leaf, j=j: leaf[j], weights)
            x = model.layer(one, x, layer_key(key, microbatch, number))
        return x

    def run(two_repeats, start, block, num_ticks):
        """Run the ticks of a block; ``two_repeats`` has the weights of the previous repeat and its own."""

        @jax.checkpoint
        def compute(two_repeats, x, late, microbatch, repeat):
            weights = jax.tree.map(lambda leaf: leaf[1 - late], two_repeats)
            return stage(weights, x, microbatch, repeat)

        def tick(carry, local):
            waiting, arrived = carry
            t = block * period + local
            back = (t - num_stages) % period
            slot = jnp.minimum(back, num_microbatches - 1)
            returned = (t >= num_stages) & (back < num_microbatches)
            waiting = waiting.at[slot].set(jnp.where(returned, arrived, waiting[slot]))
            microbatch = jnp.minimum((t - index) % period, num_microbatches - 1)
            late = (local < index).astype(jnp.int32)
            x = jnp.where(index == 0, waiting[microbatch], arrived)
            y = compute(two_repeats, x, late, microbatch, jnp.maximum(block - late, 0))
            return (waiting, lax.ppermute(y, pipe_axis, ring)), y

        return lax.scan(tick, start, jnp.arange(num_ticks))

    run_once_traced = jax.jit(run, static_argnums=3)  # blocks are alike: trace them only once

    def loss_of(params):
        x = model.embed(params["embed"], batch["inputs"])
        x = x.reshape(num_microbatches, -1, *x.shape[1:])
        carry, outputs, before = (x, jnp.zeros_like(x[0])), x, None
        for repeat in range(num_repeats):
            weights = entering(jax.tree.map(lambda leaf, i=repeat: leaf[i], params["layers"]))
            two_repeats = jax.tree.map(lambda *leaves: jnp.stack(leaves), before or weights, weights)
            last = repeat == num_repeats - 1
            num_ticks = num_microbatches + num_stages - 1 if last else period
            carry, outputs = run_once_traced(two_repeats, carry, repeat, num_ticks)
            before = weights
        outputs = outputs[-num_microbatches:]
        loss = model.loss(params["head"], outputs.reshape(-1, *outputs.shape[2:]), batch["targets"], batch["mask"])
        return jnp.where(index == num_stages - 1, share * loss, 0)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    for ends in ("embed", "head"):
        gradients[ends] = jax.tree.map(lambda g: lax.psum(g, (pipe_axis, data_axis)), gradients[ends])
    updated = jax.tree.map(lambda p, g: p - learning_rate * g, params, gradients)
    return updated, lax.psum(loss, (pipe_axis, data_axis))
    ### END SOLUTION


# %% [markdown]
# ## In your own words
#
# Your pipeline has 4 stages, 4 microbatches and 32 layers. With 2 repeats the bubble is 27%, with 4 it is 16%. A
# colleague wants 8 repeats, one layer per tick. What would that gain, what would become more expensive, and what would
# you look at on the timeline before you agree? A few sentences and one formula are enough.

# %% [markdown]
# ### BEGIN SOLUTION
# The bubble is `(S - 1) / (R*M + S - 1)`, since there are as many microbatches as stages: with 8 repeats 3/35, 8.6%.
# Each doubling of `R` halves the idle time, `(S - 1)/R` full-length ticks, so it saves half as much time as the
# previous doubling.
#
# Every tick sends one microbatch's activations, and there are `R*M + S - 1` ticks: the bytes over `pipe` and the number
# of messages grow with `R`, while the computation between two of them shrinks. Nothing overlaps with a permute in this
# program: once it takes a good part of a tick, the time saved by the smaller bubble is lost to waiting. The fixed costs
# of a tick, launching kernels and reading weights for few rows, do not shrink either. The inputs that are kept for the
# backward pass, one per tick, grow with `R` too.
#
# On the timeline I would compare the exposed time over `pipe` with the remaining bubble, at 4 and at 8 repeats. In
# favour of 8: each repeat has fewer gradients, so less of the averaging is exposed at the end.
# ### END SOLUTION

# %% [markdown]
# ## Lab: the schedule, drawn and run
#
# Your `loop_position` draws the schedule; idle ticks are dots. Compare it with your drawing. Then your
# `execute_looping_pipeline` runs it. Here a "microbatch" is a single number, and each visit to a stage adds ten to it:
# which numbers must come out?

# %%
if __name__ == "__main__":
    for num_stages, num_microbatches in ((2, 3), (4, 2)):
        num_ticks = max(num_microbatches, num_stages) + num_microbatches + num_stages - 1
        print(f"{num_stages} stages, {num_microbatches} microbatches, 2 repeats (' marks the second repeat)")
        for place in range(num_stages):
            positions = [loop_position(t, place, num_stages, num_microbatches, 2) for t in range(num_ticks)]
            row = [f"{at[0]}{chr(39) * at[1]}" if at else "." for at in positions]
            print(f"  stage {place}:", " ".join(f"{cell:2}" for cell in row))

        def visits(microbatches, count=num_stages):
            outputs = execute_looping_pipeline(lambda x, microbatch, repeat: x + 10, microbatches, 2, "pipe")
            return jnp.where(lax.axis_index("pipe") == count - 1, outputs, 0)[None]

        mesh = make_mesh({"pipe": num_stages})
        run = jax.jit(jax.shard_map(visits, mesh=mesh, in_specs=P("pipe"), out_specs=P("pipe")))
        numbers = jnp.tile(jnp.arange(float(num_microbatches))[:, None], (num_stages, 1))
        print("  outputs:", run(numbers)[-1, :, 0])

# %% [markdown]
# ## Lab: the same losses everywhere
#
# Now train eight layers on one device, on 2 pipelines of 4 stages, and on 4 pipelines of 2 stages, each with 2 repeats.
# Your `layers_of_stage` assigns layers to devices. Compiling takes up to a minute on two cores.

# %%
if __name__ == "__main__":
    model = mlp(width=32, hidden=128, num_layers=8, num_inputs=16, num_outputs=8)
    params = model.init(jax.random.key(0))
    no_padding = {"mask": jnp.ones(64)}
    batches = [regression_batch(0, i, batch=64, num_inputs=16, num_outputs=8) | no_padding for i in range(6)]
    mesh_axes = ("data", "pipe")

    def layouts(params):
        """Return the specs of the parameters, and those of each device's returned copies."""

        def like(part, spec):
            return jax.tree.map(lambda _: spec, params[part])

        places = {"embed": like("embed", P()), "layers": like("layers", P(None, "pipe")), "head": like("head", P())}
        return places, jax.tree.map(lambda spec: P("data", *spec) if len(spec) else P(mesh_axes), places)

    def on_each_device(params, batch, model, rate):
        """Take one device's step: its layers without the stage dim, and every leaf varying."""

        def varying(tree):
            return jax.tree.map(lambda leaf: as_varying(as_varying(leaf, "data"), "pipe"), tree)

        own = varying({**params, "layers": jax.tree.map(lambda leaf: leaf[:, 0], params["layers"])})
        after, loss = looping_train_step(own, batch, jax.random.key(0), model, 4, "pipe", "data", jnp.float32(rate))
        after = {**after, "layers": jax.tree.map(lambda leaf: leaf[:, None], after["layers"])}
        return jax.tree.map(lambda leaf: leaf[None], varying(after)), loss

    def placed(params, num_stages, num_repeats):
        """Arrange layers by stage, ``[num_repeats, num_stages, layers_per_stage, ...]``."""
        by_stage = [layers_of_stage(place, num_stages, num_repeats, 8) for place in range(num_stages)]
        order = jnp.asarray([[of_stage[repeat] for of_stage in by_stage] for repeat in range(num_repeats)])
        return {**params, "layers": jax.tree.map(lambda leaf: leaf[order], params["layers"])}

    def train(pipelines, num_stages):
        mesh = make_mesh({"data": pipelines, "pipe": num_stages})
        places, kept = layouts(params)
        local = partial(on_each_device, model=model, rate=0.05)
        step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(places, P("data")), out_specs=(kept, P())))
        parts, losses = placed(params, num_stages, 2), []
        for batch in batches:
            after, loss = jax.block_until_ready(step(parts, batch))  # one step at a time: few cores, many devices
            parts = jax.tree.map(lambda leaf: leaf[0], after)
            losses.append(loss)
        return losses

    runs = {"data=2 x pipe=4": train(2, 4), "data=4 x pipe=2": train(4, 2)}
    plain_step, state = make_train_step(model, optax.sgd(0.05)), optax.sgd(0.05).init(params)
    plain = jax.tree.map(jnp.copy, params)
    print("step   one device", *(f"{name:>17}" for name in runs))
    for i, batch in enumerate(batches):
        plain, state, loss = plain_step(plain, state, batch)
        print(f"{i:4}   {loss:10.5f}", *(f"{losses[i]:17.5f}" for losses in runs.values()))

# %% [markdown]
# ## Lab: where the time goes
#
# Finally, your step at the size it is graded on, on 8 A5000s, predicted from its program alone. The averages overlap
# with the backward ticks, on the row of transfers over `data`. Which of them is still exposed?

# %%
if __name__ == "__main__":
    large = mlp(width=2048, hidden=8192, num_layers=8, num_inputs=64, num_outputs=64)
    whole = jax.eval_shape(large.init, jax.random.key(0))
    stacks = jax.tree.map(lambda s: jax.ShapeDtypeStruct((4, 2, 1, *s.shape[1:]), s.dtype), whole["layers"])
    shapes = {**whole, "layers": stacks}
    places, kept = layouts(shapes)

    def program(params, batch):
        mesh, local = abstract_mesh({"data": 4, "pipe": 2}), partial(on_each_device, model=large, rate=0.01)
        mapped = jax.shard_map(local, mesh=mesh, in_specs=(places, P("data")), out_specs=(kept, P()))
        after, loss = mapped(params, batch)
        return {"params": after, "loss": loss}

    rows, counts = (jax.ShapeDtypeStruct((4 * 2048, *dims), "float32") for dims in ((64,), ()))
    step = export(
        program,
        {"params": shapes, "batch": {"inputs": rows, "targets": rows, "mask": counts}},
        {"params": places, "batch": P("data")},
        mesh={"data": 4, "pipe": 2},
        out_specs={"params": kept, "loss": P()},
    )
    prediction = predict(step, "8xA5000")
    for name, figure in prediction.figures().items():
        print(f"{name:24} {figure}")
    prediction  # noqa: B018  a notebook shows it as a picture

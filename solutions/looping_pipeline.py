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
# In a pipeline of `S` stages, `S - 1` ticks pass before the last stage has anything to do. The fewer layers a stage
# has, the shorter a tick, and the sooner it begins. But fewer layers a stage means more stages, and the number of
# devices is limited.
#
# The way out is that each device holds *several* small groups of layers. A microbatch then goes round the devices
# several times: through the first group of each, then through the second group of each, and so on. The first wait
# is as many ticks as before, and each tick is shorter. Breadth-first means that all microbatches finish a round
# before the next one begins.
#
# You will write it in four functions:
#
# | function | what it does |
# |---|---|
# | `layers_of_stage` | says which layers a device holds |
# | `loop_position` | says what a device works on at a tick |
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
# ## Who holds what: `layers_of_stage`
#
# A *stage* is a place on the axis `pipe`. With `num_repeats` rounds, each stage holds `num_repeats` groups of
# layers, all of the same size; the layers within a group follow each other in the model. In its first round, a
# microbatch goes through the first group of stage 0, the first group of stage 1, and so on to the last stage. Then
# it comes back to stage 0 for the second round. All the way it must meet the layers in their order in the model, 0,
# 1, 2, ..., as on one device.
#
# Return a tuple with one tuple of layer numbers for each repeat. Where the layers cannot be shared evenly, raise
# `ValueError` with a sentence that says how many layers were given: an answer that leaves layers out trains another
# model, and nobody notices.
#
# These are Python numbers; no JAX is needed.


# %%
def layers_of_stage(stage: int, num_stages: int, num_repeats: int, num_layers: int) -> tuple[tuple[int, ...], ...]:
    """Which layers a stage holds.

    Args:
        stage: The place on the axis, from 0.
        num_stages: How many there are.
        num_repeats: How often a microbatch passes each stage.
        num_layers: Of the whole model.

    Returns:
        One tuple for each repeat: the numbers of the layers that the stage computes in it, in order.

    Raises:
        ValueError: The layers cannot be shared evenly; the message says how many there are.
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
# ## What happens when: `loop_position`
#
# Time is counted in *ticks*: in each tick a stage computes one of its groups of layers for one microbatch, and passes
# the result on to the next stage, the last stage to stage 0. The rules of the breadth-first schedule:
#
# - Stage 0 takes the microbatches of a repeat in order, one a tick, beginning at tick 0.
# - What a stage worked on at a tick, the next stage works on at the next tick.
# - A repeat begins when all microbatches of the one before have gone in at stage 0, *and* the first of them has come
#   back to it. What comes back sooner waits at stage 0.
#
# Draw it for 2 stages and 3 microbatches, two repeats, ticks from left to right. Here is the first stage's row of a
# plain pipeline with as many, to begin with:

# %%
if __name__ == "__main__":
    for stage in range(2):
        row = ["." if not 0 <= tick - stage < 3 else str(tick - stage) for tick in range(8)]
        print(f"stage {stage}:", " ".join(row))

# %% [markdown]
# Two cases are different: more microbatches than stages, and fewer. Draw one of each, with 2 stages and 3
# microbatches, and with 4 stages and 2 microbatches. In which of them does a microbatch wait for the stage, and in
# which the stage for a microbatch?
#
# `loop_position` gives `(microbatch, repeat)`, or `None` for a tick in which the stage has nothing to do. It is asked
# for every tick and every stage, and for ticks after the end.


# %%
def loop_position(
    tick: int, stage: int, num_stages: int, num_microbatches: int, num_repeats: int
) -> tuple[int, int] | None:
    """What a stage works on at a tick of the breadth-first schedule.

    Args:
        tick: From 0, when stage 0 begins.
        stage: The place on the axis, from 0.
        num_stages: How many there are.
        num_microbatches: Parts of the batch, any number.
        num_repeats: How often each of them passes each stage.

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
# Now on the devices, inside `jax.shard_map`. Every device runs the same program and knows its place from
# `lax.axis_index`. `stage(x, microbatch, repeat)` computes one group of layers of the device that calls it: it
# chooses the weights by `repeat`, and what is random by both. `x` and its result have the shape of a microbatch,
# `[microbatch_size, ...]`; `microbatch` and `repeat` are scalars, and may be computed ones, which is what they are in
# a `lax.scan` over ticks. A stage sends nothing.
#
# - Stage 0's input in the first repeat is `microbatches`, in later ones what the last stage has sent it. What arrives
#   there early must be kept until its turn comes. The other stages take what has just arrived.
# - A stage may compute garbage in idle ticks, or skip them with `lax.cond`; both take the same time. No garbage may
#   reach a result, not even multiplied by zero: in a case without gradients, `check`'s stages return NaN for a
#   microbatch or a repeat that does not exist, and zero times NaN is NaN.
# - Return `[num_microbatches, microbatch_size, ...]`: what the *last* stage gave in the last repeat, in order of the
#   microbatches. The other stages return an array of that shape, whatever it holds.
# - Everything must be differentiable, and `axis_name` may have any size, 1 too.
#
# | budget | |
# |---|---|
# | bubble, with a free network | `1 - R*M/T` within 1 %, with `T = (R-1)*max(M,S) + M + S - 1` ticks |
# | bytes permuted, forward and backward each | at most one microbatch a tick |
# | any other collective | none |
#
# `S` is the number of stages, `M` of microbatches, `R` of repeats. What you are judged on has `M` above, equal to and
# below `S`, and `M` that is no multiple of `S`. How large is the bubble with and without looping?

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
# `lax.ppermute(x, axis_name, [(0, 1), (1, 2), (2, 0)])` passes on along a ring of three. The carry of a `lax.scan`
# keeps its type: what a device computes varies over `axis_name`, and so do `microbatches` when they arrive here.
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
    """Microbatches through all stages, ``num_repeats`` times round, breadth-first. Runs inside ``shard_map``.

    Args:
        stage: ``(x, microbatch, repeat) -> y``: this device's layers of a repeat; ``x`` and ``y``
            ``[microbatch_size, ...]``.
        microbatches: Inputs of the first layer, ``[num_microbatches, microbatch_size, ...]``, varying over
            ``axis_name``; stage 0's count.
        num_repeats: How often a microbatch passes each stage.
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
        # What comes back to stage 0 left it num_stages ticks ago, and waits in its own place for its next repeat.
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
# ## Average while others run: `looping_train_step`
#
# On a mesh with the axes `data` and `pipe`, every group of devices along `pipe` is a pipeline of its own, and works
# on its own rows. After the backward pass, the gradients of all layers are averaged over `data`. That is a long
# transfer, at a time when nothing is left to compute.
#
# A looped pipeline goes backward through its repeats one after the other, the last one first. When a repeat's last
# backward tick is over on all stages, its gradients are complete, and their average could travel while *earlier*
# repeats are still running backward. Only those of repeat 0 have nothing left to hide behind. How long does each
# take? For a group of one layer of width 2,048 and hidden size 8,192 on 8 A5000, 4 groups of 2 stages, with 4
# microbatches of 512 rows:

# %%
if __name__ == "__main__":
    a5000, weights = machine("8xA5000"), 2 * 2048 * 8192
    matmuls = 3 * 2 * 512 * weights / (a5000.peak("f32") * a5000.efficiency.matmul)
    average = 2 * 3 / 4 * 4 * weights / min(link.bandwidth for link in a5000.links)
    print(f"backward tick, with the forward pass again: {1e3 * matmuls:.1f} ms; 4 of them: {4e3 * matmuls:.1f} ms")
    print(f"average of one repeat's gradients over data: {1e3 * average:.1f} ms; of four: {4e3 * average:.1f} ms")

# %% [markdown]
# JAX's derivative of **one** scan over all ticks gives the gradients of all repeats at its end, together. So cut the
# ticks into blocks, one for each repeat: `max(M, S)` ticks, and in the last block all that are left. In the first
# ticks of a block, the later stages have not begun its repeat: at the block's local tick `j`, stages with an index
# above `j` still work for the repeat before. So a block needs the weights of two repeats, and once the backward pass
# has left block `b`, the gradients of repeat `b` are complete everywhere.
#
# Where in the backward pass is the average taken? Where you put it: with `jax.custom_vjp`, a function that
# returns its argument as it is may do anything backward. Through such a function the weights of a repeat *enter*
# the first block that uses them, and what flows back to it is that repeat's whole gradient. Its backward rule has
# to return what varies like the argument, and a sum over an axis no longer varies along it: see `as_varying`.
#
# The timeline's rules, once more: computations run in the order of your program; a transfer begins when its operand
# is there, and runs beside what is computed next; a loop iteration ends when its computations and its transfers have
# ended; what is outside of a loop may run beside it.
#
# The step:
#
# - `params["layers"]` has this stage's layers, `[num_repeats, layers_per_stage, ...]`, in the order of
#   `layers_of_stage`. `params["embed"]` and `params["head"]` are whole on every device. **All leaves vary over both
#   axes**: no gradient is reduced unless you say so.
# - `batch` has the rows of this device's pipeline, the same on all its stages. Take them in `num_microbatches` equal
#   parts, in order.
# - Stage 0 embeds (`model.embed(params["embed"], inputs)`), the last stage has the loss, `model.loss(params["head"], x,
#   targets, mask)`. `batch["mask"]` is 1 where a row of an MLP's batch, or a token of a Transformer's, counts, and 0
#   where it is padding; the loss is the mean over what counts, and 0 where nothing does.
# - `key` is the same on every device. Place `i` on `data_axis` uses `fold_in(key, i)`, which is what
#   `fold_key_over_axes(key, (data_axis,))` from the chapter `data_parallel` gives, and layer number `l` of the
#   model computes microbatch `m` as `model.layer(weights, x, layer_key(key, m, l))`. So the same is dropped as on
#   one device, in every recomputation too.
# - Recompute each tick's layers in the backward pass (`jax.checkpoint`): what is kept of a tick is its input. What
#   is outside of the function that you wrap is kept as well: a group of weights that you have *chosen* before is
#   an input.
# - Update by plain SGD, `p - learning_rate * gradient`, with the gradient of the mean loss over all that count in all
#   pipelines; in some of these nothing may count. For embedding and head it comes from one stage and is needed on all
#   stages. Return the parameters and that loss, the same on every device.
#
# | budget | |
# |---|---|
# | exposed over `data`, on 8 A5000 | at most 0.5 times that of one average after the backward pass |
# | FLOPs | at most 9/7 of the reference's: a tick's layers once more, not twice |
# | temporaries that live at once | at most 1.5 times the reference's |
# | all-reduce | gradients and two numbers once over `data`, leaf by leaf or in larger pieces |
# | all-reduce over `pipe` | embedding, head and a number once |
# | bytes permuted over `pipe` | at most one microbatch a tick, forward and backward |
# | any other collective | none |
#
# The size is that of the example above, with 4 repeats. What is exposed over `data` is the step less the same step
# with free links on that axis.
#
# Useful: `jax.tree.map`, a Python loop over repeats around a `lax.scan` over ticks, `lax.psum` over one axis or
# several. Weighing each pipeline's loss *before* differentiating makes every reduction a plain sum.


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
    """One step of SGD, each repeat's gradients averaged while earlier ones run backward. Runs inside ``shard_map``.

    Args:
        params: Whole ``embed`` and ``head``, and this stage's ``layers``, ``[num_repeats, layers_per_stage, ...]``; all
            of them vary over both axes.
        batch: The rows of this device's pipeline, ``inputs``, ``targets`` and ``mask``, ``[batch/data, ...]``.
        key: For dropout, the same on every device.
        model: The model's pure functions.
        num_microbatches: How many parts the rows are taken in; divides their number.
        pipe_axis: The mesh axis of the stages.
        data_axis: The mesh axis of the pipelines.
        learning_rate: A scalar.

    Returns:
        ``(params, loss)``: the updated parameters, and the mean loss over all that count, the same on every device.
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
        # A group is small: written out, its last product is not computed again in vain.
        for j in range(layers_per_stage):
            number = (repeat * num_stages + index) * layers_per_stage + j
            one = jax.tree.map(lambda leaf, j=j: leaf[j], weights)
            x = model.layer(one, x, layer_key(key, microbatch, number))
        return x

    def run(two_repeats, start, block, num_ticks):
        """Ticks of a block: ``two_repeats`` has the weights of the repeat before, and of its own."""

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

    run_once_traced = jax.jit(run, static_argnums=3)  # blocks are alike, and need not be traced one by one

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
# Your pipeline has 4 stages, 4 microbatches and 32 layers. With 2 repeats the bubble is 27 %, with 4 it is 16 %. A
# colleague wants 8 repeats, one layer a tick. What do they gain, what becomes more expensive, and what would you
# look at on the timeline before you agree? A few sentences and one formula are enough.

# %% [markdown]
# ### BEGIN SOLUTION
# The bubble is `(S - 1) / (R*M + S - 1)`, since there are as many microbatches as stages: with 8 repeats 3/35, 8.6 %.
# Each doubling of `R` saves about half as much as the one before.
#
# Every tick sends one microbatch's activations, and there are `R*M + S - 1` ticks: the bytes over `pipe` and the
# number of messages grow with `R`, while the computation between two of them shrinks. Once a permute takes a good
# part of a tick, and in this program nothing runs beside it, what the smaller bubble saves is spent on waiting. What
# a tick costs beside its matrix products, starting kernels and reading weights for few rows, does not shrink either.
# The inputs that are kept for the backward pass, one a tick, grow with `R` too.
#
# On the timeline I would compare the exposed time over `pipe` with the bubble that is left, at 4 and at 8 repeats. In
# favour of 8: a repeat's gradients are smaller, so less of their average is exposed at the end.
# ### END SOLUTION

# %% [markdown]
# ## Lab: the schedule, drawn and run
#
# Your `loop_position` draws the schedule; idle ticks are dots. Compare this drawing with yours. Then your
# `execute_looping_pipeline` runs it. Here a "microbatch" is a single number, and each visit to a stage adds ten to it,
# so nothing is computed but the order: which numbers must come out?

# %%
if __name__ == "__main__":
    for num_stages, num_microbatches in ((2, 3), (4, 2)):
        num_ticks = max(num_microbatches, num_stages) + num_microbatches + num_stages - 1
        print(f"{num_stages} stages, {num_microbatches} microbatches, 2 repeats: microbatch, and ' in the second one")
        for place in range(num_stages):
            found = [loop_position(t, place, num_stages, num_microbatches, 2) for t in range(num_ticks)]
            row = [f"{at[0]}{chr(39) * at[1]}" if at else "." for at in found]
            print(f"  stage {place}:", " ".join(f"{cell:2}" for cell in row))

        def visits(microbatches, count=num_stages):
            outputs = execute_looping_pipeline(lambda x, microbatch, repeat: x + 10, microbatches, 2, "pipe")
            return jnp.where(lax.axis_index("pipe") == count - 1, outputs, 0)[None]

        mesh = make_mesh({"pipe": num_stages})
        run = jax.jit(jax.shard_map(visits, mesh=mesh, in_specs=P("pipe"), out_specs=P("pipe")))
        numbers = jnp.tile(jnp.arange(float(num_microbatches))[:, None], (num_stages, 1))
        print("  comes out as", run(numbers)[-1, :, 0])

# %% [markdown]
# ## Lab: the same losses everywhere
#
# Now train. Your `layers_of_stage` says which device holds which layers. Eight layers on one device, on 2 pipelines of
# 4 stages, and on 4 pipelines of 2 stages, each in 2 repeats. Compiling them takes up to a minute on two cores.

# %%
if __name__ == "__main__":
    model = mlp(width=32, hidden=128, num_layers=8, num_inputs=16, num_outputs=8)
    params = model.init(jax.random.key(0))
    no_padding = {"mask": jnp.ones(64)}
    batches = [regression_batch(0, i, batch=64, num_inputs=16, num_outputs=8) | no_padding for i in range(6)]
    mesh_axes = ("data", "pipe")

    def layouts(params):
        """How parameters are placed, and how each device gives back what it holds."""

        def like(part, spec):
            return jax.tree.map(lambda _: spec, params[part])

        places = {"embed": like("embed", P()), "layers": like("layers", P(None, "pipe")), "head": like("head", P())}
        return places, jax.tree.map(lambda spec: P("data", *spec) if len(spec) else P(mesh_axes), places)

    def on_each_device(params, batch, model, rate):
        """One step as a device takes it: its own layers without the dim of the stages, and every leaf varying."""

        def varying(tree):
            return jax.tree.map(lambda leaf: as_varying(as_varying(leaf, "data"), "pipe"), tree)

        held = varying({**params, "layers": jax.tree.map(lambda leaf: leaf[:, 0], params["layers"])})
        after, loss = looping_train_step(held, batch, jax.random.key(0), model, 4, "pipe", "data", jnp.float32(rate))
        after = {**after, "layers": jax.tree.map(lambda leaf: leaf[:, None], after["layers"])}
        return jax.tree.map(lambda leaf: leaf[None], varying(after)), loss

    def placed(params, num_stages, num_repeats):
        """Layers as the stages hold them, ``[num_repeats, num_stages, layers_per_stage, ...]``."""
        held = [layers_of_stage(place, num_stages, num_repeats, 8) for place in range(num_stages)]
        order = jnp.asarray([[of_stage[repeat] for of_stage in held] for repeat in range(num_repeats)])
        return {**params, "layers": jax.tree.map(lambda leaf: leaf[order], params["layers"])}

    def train(pipelines, num_stages):
        mesh = make_mesh({"data": pipelines, "pipe": num_stages})
        places, kept = layouts(params)
        local = partial(on_each_device, model=model, rate=0.05)
        step = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(places, P("data")), out_specs=(kept, P())))
        held, losses = placed(params, num_stages, 2), []
        for batch in batches:
            after, loss = jax.block_until_ready(step(held, batch))  # one step at a time: few cores, many devices
            held = jax.tree.map(lambda leaf: leaf[0], after)
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
# Last, your step at the size that it is judged on, on 8 A5000, from its program alone. The averages run beside the
# backward ticks, on the row of transfers over `data`. Which of them is still exposed?

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

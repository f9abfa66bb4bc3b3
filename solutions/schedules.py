# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Pipeline schedules
#
# If JAX differentiates a forward pipeline, the result is GPipe: all microbatches forward, then all of them backward,
# and every stage keeps the activations of every microbatch. Other orders keep less, or wait less, but to run one of
# them you have to write the backward pass yourself.
#
# First you write three well-known orders as text. Then you split the backward pass in two, and write one program that
# runs *any* valid order. Finally, you let a pipeline run without ever draining, and pay for that with stale weights.
#
# | function | what it does |
# |---|---|
# | `one_f_one_b` | 1F1B: each stage alternates forward and backward passes |
# | `interleaved` | the same with several parts of the model on each device |
# | `split_backward` | a layer's backward pass in two: the gradient of its input, and that of its weights |
# | `zero_bubble` | the gradients of weights fill idle time |
# | `execute_schedule` | one SPMD program for every schedule |
# | `two_weight_versions_step` | PipeDream-2BW: a step whose gradient is one update late |

# %%
from collections.abc import Callable
from functools import partial
from string import ascii_lowercase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from IPython.display import HTML, display
from jax import lax
from jax.sharding import PartitionSpec as P

from course.mesh import abstract_mesh, as_varying, make_mesh
from course.predict import predict
from course.program import export
from course.render import schedule_svg
from course.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHTS,
    FORWARD,
    IDLE,
    Costs,
    Table,
    empty_slots,
    gpipe,
    measure,
    read_slot,
    run,
    tabulate,
    write_slot,
    written,
)

PyTree = Any
# The three functions of `split_backward`.
Stage = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]

# %% [markdown]
# ## One forward, one backward: `one_f_one_b`
#
# A schedule is a line of text for each stage. `F2` is the forward pass of microbatch 2 and `B2` its backward pass,
# which takes twice as long. A stage does one action after another, in the order of its line, and each action begins as
# soon as its inputs are available. `written` reads such lines, `schedule_svg` draws them, and `measure(run(...))`
# computes what they cost. Here is GPipe's order for 3 stages and 3 microbatches, written by hand:

# %%
if __name__ == "__main__":
    by_hand = written(["F0 F1 F2 B2 B1 B0"] * 3, name="by hand")
    cost = measure(run(by_hand))
    print(f"a step takes {cost.time:g}, bubble {cost.bubble:.1%}, microbatches in flight {cost.activations}")
    display(HTML(schedule_svg(by_hand)))

# %% [markdown]
# A microbatch is **in flight** on a stage from its forward pass there to its backward pass: for that long, its
# activations are kept. In 1F1B a stage starts only as many microbatches as it needs to stay busy until the first one
# comes back. From then on it alternates between one backward pass and one forward pass, and ends with the remaining
# backward passes.
#
# Return a line for each stage. Microbatches are numbered from 0. With a forward pass of 1 and a backward pass of 2:
#
# | budget | |
# |---|---|
# | valid | every stage runs each microbatch once forward and once backward, and no stage waits forever |
# | time of a step | `3 (M + S - 1)`, for `S` stages and `M` microbatches: a bubble of `(S-1)/(M+S-1)`, like GPipe's |
# | in flight on stage `s` | at most `min(S - s, M)` microbatches |
#
# `check` tries several `S` up to 8 and `M` up to 16, and also fewer microbatches than stages. Any order that meets
# these limits is accepted.


# %%
def one_f_one_b(num_stages: int, num_microbatches: int) -> tuple[str, ...]:
    """Order the forward and backward passes on each stage by 1F1B.

    Args:
        num_stages: Stages in the pipeline.
        num_microbatches: Microbatches in a step.

    Returns:
        A line for each stage, such as ``"F0 F1 B0 B1"``.
    """
    ### BEGIN SOLUTION
    lines = []
    for stage in range(num_stages):
        ahead = min(num_stages - stage, num_microbatches)
        words = [f"F{microbatch}" for microbatch in range(ahead)]
        for microbatch in range(num_microbatches):
            words.append(f"B{microbatch}")
            if microbatch + ahead < num_microbatches:
                words.append(f"F{microbatch + ahead}")
        lines.append(" ".join(words))
    return tuple(lines)
    ### END SOLUTION


# %% [markdown]
# ## Several parts on each device: `interleaved`
#
# As in the chapter `looping_pipeline`, each device now holds `R` parts of the model, and a microbatch goes around the
# stages `R` times. A letter after the number says which part: `F3b` is microbatch 3 in its second round. A forward pass
# through one part takes `1/R`, so filling and draining take `1/R` of the time.
#
# Interleaved 1F1B is depth-first: it does not wait until all microbatches have finished a round. Microbatches go around
# in groups of `S`. A stage takes the `S` microbatches of a group through its first part, then the same ones through its
# second part, and so on; then comes the next group. In backward passes, parts come in the opposite order. So the order
# of the forward passes among themselves is fixed, and so is that of the backward passes:

# %%
if __name__ == "__main__":
    forward_order = [f"F{group * 2 + m}{'ab'[r]}" for group in range(2) for r in range(2) for m in range(2)]
    backward_order = [f"B{group * 2 + m}{'ba'[r]}" for group in range(2) for r in range(2) for m in range(2)]
    print("2 stages, 4 microbatches, 2 repeats")
    print("forward: ", *forward_order)
    print("backward:", *backward_order)

# %% [markdown]
# Stage `s` begins with `2 (S - s - 1) + (R - 1) S` forward passes, or with all `R M` if there are fewer (Megatron's
# formula). Then it alternates between one forward and one backward pass, forward first, and ends with the remaining
# backward passes.
#
# | budget | |
# |---|---|
# | valid | every microbatch and part once forward and once backward, and no stage waits forever |
# | time of a step | `3 (M + (S - 1)/R)`: a bubble of `(S-1)/(R M + S - 1)` |
# | in flight on stage `s` | at most `2 (S - s - 1) + (R - 1) S + 1` parts, or `R M` if that is less |
#
# `check` tries `R` from 2 to 4. Microbatches that cannot be put into groups of `S` are an error: raise a `ValueError`
# that names both numbers, `num_microbatches` and `num_stages`.


# %%
def interleaved(num_stages: int, num_microbatches: int, num_repeats: int) -> tuple[str, ...]:
    """Order the passes on each stage by interleaved 1F1B.

    Args:
        num_stages: Stages in the pipeline.
        num_microbatches: Microbatches in a step, a multiple of ``num_stages``.
        num_repeats: Parts of the model on each device, at least 2.

    Returns:
        A line for each stage, such as ``"F0a F1a F0b F1b B0b B1b B0a B1a"``.

    Raises:
        ValueError: The stages do not divide the microbatches; the message names both numbers.
    """
    ### BEGIN SOLUTION
    if num_microbatches % num_stages:
        raise ValueError(f"{num_microbatches} microbatches cannot go round in groups of {num_stages}")
    turns = num_microbatches * num_repeats

    def word(kind, turn):
        group, place = divmod(turn, num_stages * num_repeats)
        repeat, member = divmod(place, num_stages)
        repeat = repeat if kind == "F" else num_repeats - 1 - repeat
        return f"{kind}{group * num_stages + member}{ascii_lowercase[repeat]}"

    lines = []
    for stage in range(num_stages):
        ahead = min(2 * (num_stages - stage - 1) + (num_repeats - 1) * num_stages, turns)
        words = [word("F", turn) for turn in range(ahead)]
        for turn in range(turns):
            if turn + ahead < turns:
                words.append(word("F", turn + ahead))
            words.append(word("B", turn))
        lines.append(" ".join(words))
    return tuple(lines)
    ### END SOLUTION


# %% [markdown]
# ## Two halves of a backward pass: `split_backward`
#
# A backward pass computes two things. The previous stage waits for the gradient of the layer's *input*. The gradient of
# its *weights* is not needed until the end of the step. `jax.vjp` computes both at once; here they become two functions
# that can be called at different times.
#
# The layer is a residual MLP, for rows `x` of `[rows, width]`:
#
#     z = x @ weights["up"]                            # [rows, hidden]
#     y = x + activation(z) @ weights["down"]          # [rows, width]
#
# Write it down for one product first. For `y = x @ w`, a gradient `dy` of the output gives `dy @ w.T` for the input and
# `x.T @ dy` for the weights, one product each:

# %%
if __name__ == "__main__":
    x, w, dy = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(4, 3), (3, 5), (4, 5)]))
    of_x, of_w = jax.vjp(lambda x, w: x @ w, x, w)[1](dy)
    print("input:", jnp.allclose(of_x, dy @ w.T), "  weights:", jnp.allclose(of_w, x.T @ dy))

# %% [markdown]
# Return three functions:
#
# - `forward(weights, x)` returns `(y, saved)`: what you save is up to you, in a tree of arrays that a slot can hold.
#   The function that `jax.vjp` returns is not such a tree: each call of `jax.vjp` returns a different one;
# - `backward_input(weights, saved, dy)` returns `(dx, pending)`: the gradient of `x`, and a tree of arrays with
#   whatever the last function needs in addition to `saved`;
# - `backward_weights(saved, pending)` returns the gradients of the weights, a tree like `weights`. It does not get the
#   weights.
#
# `activation` works elementwise; `jax.vjp(activation, z)` differentiates it.
#
# | budget | |
# |---|---|
# | products in `forward` | 2 of `rows x width x hidden` |
# | products in `backward_input` | 2: nothing is recomputed, and nothing is computed for later |
# | products in all three | 6: together, the two halves cost as much as one backward pass |


# %%
def split_backward(activation: Callable[[jax.Array], jax.Array]) -> Stage:
    """Make a residual MLP layer whose backward pass comes in two parts.

    Args:
        activation: An elementwise function.

    Returns:
        ``(forward, backward_input, backward_weights)``, to be called in this order: ``forward(weights, x) -> (y,
        saved)``, ``backward_input(weights, saved, dy) -> (dx, pending)``, ``backward_weights(saved, pending) ->
        gradients of weights``. ``weights`` has ``up``, ``[width, hidden]``, and ``down``, ``[hidden, width]``.
    """

    ### BEGIN SOLUTION
    def forward(weights, x):
        z = x @ weights["up"]
        return x + activation(z) @ weights["down"], {"x": x, "z": z}

    def backward_input(weights, saved, dy):
        (dz,) = jax.vjp(activation, saved["z"])[1](dy @ weights["down"].T)
        return dy + dz @ weights["up"].T, {"dy": dy, "dz": dz}

    def backward_weights(saved, pending):
        return {"up": saved["x"].T @ pending["dz"], "down": activation(saved["z"]).T @ pending["dy"]}

    return forward, backward_input, backward_weights
    ### END SOLUTION


# %% [markdown]
# ## Fill the bubble: `zero_bubble`
#
# With the two halves, a schedule has three kinds of action: `F3`, `I3` (the gradient of the input) and `W3` (the
# gradient of the weights), each of length 1. `I3` needs what `B3` needed. `W3` needs only its own stage's `I3`.
#
# A stage that waits for a gradient now waits only for an `I`, so gradients come back sooner. And a `W` can be postponed
# until its stage has nothing better to do. But as long as its `W` has not run, a microbatch is in flight. **ZB-H1**
# postpones as much as it can without exceeding the first stage of 1F1B, which has `min(S, M)` microbatches in flight:
# stage `s` starts as in 1F1B, and runs the `W` of a microbatch right after the `I` of the microbatch `s` places later.
# The `W` that are left run at the end.

# %%
if __name__ == "__main__":
    for title, lines in {
        "1F1B": ["F0 F1 I0 W0 I1 W1", "F0 I0 W0 F1 I1 W1"],
        "W put off": ["F0 F1 I0 W0 I1 W1", "F0 I0 F1 I1 W0 W1"],
    }.items():
        tried = run(written(lines, name=title), Costs(1, 1, 1))
        print(f"{title:9} of 2 stages and 2 microbatches takes {tried.end:g}, bubble {measure(tried).bubble:.1%}")

# %% [markdown]
# | budget, with passes of length 1 | |
# |---|---|
# | valid | every microbatch once as `F`, `I` and `W` on each stage, or `B` for the last two; no stage waits forever |
# | time of a step, where `M >= S` | `3 M + S - 1`: the time lost is a third of 1F1B's |
# | time of a step, where `M < S` | at most 1F1B's, `3 (M + S - 1)` |
# | in flight on any stage | at most `min(S, M)` microbatches, each from its `F` to the end of its `W` |


# %%
def zero_bubble(num_stages: int, num_microbatches: int) -> tuple[str, ...]:
    """Order forward passes, input gradients and weight gradients on each stage by ZB-H1.

    Args:
        num_stages: Stages in the pipeline.
        num_microbatches: Microbatches in a step.

    Returns:
        A line for each stage, such as ``"F0 F1 I0 W0 I1 W1"``.
    """
    ### BEGIN SOLUTION
    lines = []
    for stage in range(num_stages):
        ahead = min(num_stages - stage, num_microbatches)
        words = [f"F{microbatch}" for microbatch in range(ahead)]
        for microbatch in range(num_microbatches):
            words.append(f"I{microbatch}")
            if microbatch >= stage:
                words.append(f"W{microbatch - stage}")
            if microbatch + ahead < num_microbatches:
                words.append(f"F{microbatch + ahead}")
        words += [f"W{microbatch}" for microbatch in range(max(num_microbatches - stage, 0), num_microbatches)]
        lines.append(" ".join(words))
    return tuple(lines)
    ### END SOLUTION


# %% [markdown]
# ## One program for all of them: `execute_schedule`
#
# All devices run the same program, so a schedule becomes a **table**: integers for each tick and stage that say what to
# do. `F`, `I` and `W` take one tick each; a whole `B` is an `I`, with its `W` in the next tick. `tabulate` makes the
# table. Values are kept in **slots**, which are reused, so there are only as many as the schedule needs:

# %%
if __name__ == "__main__":
    for schedule in (gpipe(2, 4), written(["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"], name="1F1B")):
        table = tabulate(schedule)
        print(f"{schedule.name}: {table.num_ticks} ticks, slots {table.num_slots}")
    for name in ("action", "microbatch", "saved", "arrived_input"):
        for stage_number, column in enumerate(table.columns[name].T):
            print(f"{name:14} stage {stage_number}", *(f"{number:2}" for number in column))

# %% [markdown]
# `table.columns` has these, each `[num_ticks, num_stages]`:
#
# | column | meaning for a tick and a stage |
# |---|---|
# | `action` | `IDLE`, `FORWARD`, `BACKWARD_INPUT` or `BACKWARD_WEIGHTS`: 0, 1, 2, 3 |
# | `microbatch`, `repeat` | the microbatch, and which of the stage's parts |
# | `inputs` | the slot with the input of a forward pass; the first part of the model takes a microbatch instead |
# | `saved` | the slot for what `forward` saves, written in `F` and read in `I` and `W` |
# | `gradients` | the slot with the gradient of the output; for the last part of the model, `F` writes it |
# | `pending` | the slot for what `I` leaves for `W` |
# | `arrived_input`, `arrived_gradient` | the slots for what was sent here in the previous tick; -1 if nothing was |
#
# `table.num_slots` has the number of slots of each kind: `inputs`, `saved`, `gradients` and `pending`.
#
# Part `repeat * S + stage` of the model comes after part `repeat * S + stage - 1`. In each tick, a device
#
# 1. puts what has arrived into its slots;
# 2. does its one action: `lax.switch` selects it, and nothing else is computed;
# 3. sends an output to the next stage and a gradient to the previous one, around a ring. Every device sends in every
#    tick, needed or not: a collective inside a branch would wait for devices that never reach it.
#
# `stage` is three functions like those of `split_backward`, with trees for weights, `saved` and `pending`. All parts of
# the model are alike, and their inputs and outputs have the shape of a microbatch. `loss(y, i)` takes the last part's
# output for a microbatch and that microbatch's number, an integer that may be traced, and returns the mean over the
# microbatch's rows, a scalar. The loss of the batch is the **mean over microbatches**, and all gradients are gradients
# of that.
#
# | budget | |
# |---|---|
# | `ppermute` | two per tick, each of one microbatch's activations; you may leave out those that carry nothing |
# | any other collective | none |
# | bubble, with zero-cost communication | at most 1.03 times the table's (ZB-H1, 4 stages, 12 microbatches) |
# | live temporaries, there | at most 1.35 times the reference's: slots, not an entry for each microbatch |
#
# `read_slot(tree, i)` returns entry `i` of every leaf, and `write_slot(tree, i, new, when)` a tree with `new` there, or
# the same tree if `when` is false; `empty_slots(shapes, count, like)` makes zeros that vary as `like` does: over
# `axis_name`, and over any other axis of the mesh. Useful: `lax.scan` over the rows of the columns, `lax.switch`,
# `jax.value_and_grad`, and `jax.eval_shape` for the shapes of what is saved and pending.


# %%
def execute_schedule(
    stage: Stage,
    loss: Callable[[jax.Array, jax.Array], jax.Array],
    table: Table,
    weights: PyTree,
    microbatches: jax.Array,
    axis_name: str,
) -> tuple[jax.Array, PyTree]:
    """Compute the loss and gradients of a batch by following a table. Runs inside ``shard_map``.

    Args:
        stage: ``(forward, backward_input, backward_weights)`` of one part of the model, as ``split_backward`` returns
            them.
        loss: ``(y, i) -> scalar``, the mean over the rows of microbatch number ``i``, whose output is ``y``.
        table: What each stage does in each tick.
        weights: The weights of this stage's parts, leaves ``[num_repeats, ...]``; varying over ``axis_name``.
        microbatches: Inputs of the first part, ``[num_microbatches, microbatch_size, ...]``; varying over
            ``axis_name``.
        axis_name: The mesh axis of the stages.

    Returns:
        ``(loss, gradients)``: on the last stage the mean loss over all microbatches, on others anything; and the
        gradients of this stage's ``weights``, in a tree like ``weights``.
    """
    ### BEGIN SOLUTION
    forward, backward_input, backward_weights = stage
    index, num_stages = lax.axis_index(axis_name), lax.axis_size(axis_name)
    ahead = [(i, (i + 1) % num_stages) for i in range(num_stages)]
    behind = [(after, before) for before, after in ahead]
    example, one = microbatches[0], read_slot(weights, 0)
    saved = jax.eval_shape(forward, one, example)[1]
    pending = jax.eval_shape(backward_input, one, saved, example)[1]

    def run_forward(state, at):
        part = at["repeat"] * num_stages + index
        x = jnp.where(part == 0, microbatches[at["microbatch"]], read_slot(state["inputs"], at["inputs"]))
        y, saved = forward(read_slot(weights, at["repeat"]), x)
        share, dy = jax.value_and_grad(lambda y: loss(y, at["microbatch"]) / len(microbatches))(y)
        last = part == table.num_repeats * num_stages - 1
        gradients = write_slot(state["gradients"], at["gradients"], dy, when=last)
        total = state["loss"] + jnp.where(last, share, 0)
        saved = write_slot(state["saved"], at["saved"], saved)
        return state | {"y": y, "saved": saved, "gradients": gradients, "loss": total}

    def run_backward_input(state, at):
        saved, dy = read_slot(state["saved"], at["saved"]), read_slot(state["gradients"], at["gradients"])
        dx, pending = backward_input(read_slot(weights, at["repeat"]), saved, dy)
        return state | {"dx": dx, "pending": write_slot(state["pending"], at["pending"], pending)}

    def run_backward_weights(state, at):
        own = backward_weights(read_slot(state["saved"], at["saved"]), read_slot(state["pending"], at["pending"]))
        return state | {"sums": jax.tree.map(lambda sums, g: sums.at[at["repeat"]].add(g), state["sums"], own)}

    actions = {
        IDLE: lambda state, at: state,
        FORWARD: run_forward,
        BACKWARD_INPUT: run_backward_input,
        BACKWARD_WEIGHTS: run_backward_weights,
    }

    def tick(state, row):
        at = {name: column[index] for name, column in row.items()}
        for kind, sent, slot in (("inputs", "y", "arrived_input"), ("gradients", "dx", "arrived_gradient")):
            state[kind] = write_slot(state[kind], at[slot], state[sent], when=at[slot] >= 0)
        state = lax.switch(at["action"], [actions[number] for number in sorted(actions)], state, at)
        y, dx = lax.ppermute(state["y"], axis_name, ahead), lax.ppermute(state["dx"], axis_name, behind)
        return state | {"y": y, "dx": dx}, None

    kept = {"inputs": example, "saved": saved, "gradients": example, "pending": pending}
    state = {kind: empty_slots(tree, table.num_slots[kind], like=example) for kind, tree in kept.items()}
    state |= {"y": jnp.zeros_like(example), "dx": jnp.zeros_like(example), "loss": 0 * jnp.sum(example)}
    state |= {"sums": jax.tree.map(jnp.zeros_like, weights)}
    state, _ = lax.scan(tick, state, table.columns)
    return state["loss"], state["sums"]
    ### END SOLUTION


# %% [markdown]
# ## Never drain: `two_weight_versions_step`
#
# A pipeline that takes in the next batch while the previous one is still on its way back has no bubble at all. But then
# a batch enters before the previous batch has updated the weights. **PipeDream-2BW** settles for a gradient that is
# exactly one update late: every stage holds two versions of its weights, batch `t` uses the older one for all of its
# passes, and its gradient changes the newest one:
#
#     w[t + 1] = w[t] - learning_rate * gradient of batch t at w[t - 1]
#
# This is what it does to plain SGD on a parabola, `w**2 / 2`, whose gradient is `w`:

# %%
if __name__ == "__main__":
    for rate in (0.5, 0.9, 1.1):
        plain, newest, older = 1.0, 1.0, 1.0
        for _ in range(20):
            plain = plain - rate * plain
            newest, older = newest - rate * older, newest
        print(f"learning rate {rate}: after 20 steps {abs(plain):8.1e}, one update late {abs(newest):8.1e}")

# %% [markdown]
# Write one step of this recursion with `execute_schedule`. Batch `t` needs nothing that batch `t - 1` computes, so a
# pipeline would not have to drain between them. (Your program still runs one batch after the other.)
#
# - `versions` has `newest`, `w[t]`, and `older`, `w[t - 1]`: two trees like the `weights` of `execute_schedule`, whose
#   leaves vary over both axes. Return the same for the next step.
# - Each pipeline along `data_axis` has its own rows, the same number for each. Gradients are those of the mean over all
#   rows.
# - Also return the mean loss over all rows, at the weights that were used, the same on every device.
#
# `check` takes several steps and counts the bytes of all of them. What it calls gradients is the change of `newest`
# over all steps, divided by the learning rate.
#
# | budget | |
# |---|---|
# | weights on a device | two versions |
# | all-reduce over `data` | every gradient once, and the loss |
# | all-reduce over `pipe` | the loss |
# | `ppermute` | as in `execute_schedule` |
# | any other collective | none |


# %%
def two_weight_versions_step(
    stage: Stage,
    loss: Callable[[jax.Array, jax.Array], jax.Array],
    table: Table,
    versions: dict[str, PyTree],
    microbatches: jax.Array,
    learning_rate: jax.Array,
    pipe_axis: str,
    data_axis: str,
) -> tuple[dict[str, PyTree], jax.Array]:
    """Take one step of SGD with the gradient at the older weights. Runs inside ``shard_map``.

    Args:
        stage: As for ``execute_schedule``.
        loss: As for ``execute_schedule``.
        table: As for ``execute_schedule``.
        versions: ``newest`` and ``older`` weights of this stage's parts; varying over both axes.
        microbatches: Inputs of this device's pipeline, ``[num_microbatches, microbatch_size, ...]``; varying over both
            axes.
        learning_rate: A scalar.
        pipe_axis: The mesh axis of the stages.
        data_axis: The mesh axis of the pipelines.

    Returns:
        ``(versions, loss)``: the two versions after the step, and the mean loss at the older weights over all rows.
    """
    ### BEGIN SOLUTION
    own, gradients = execute_schedule(stage, loss, table, versions["older"], microbatches, pipe_axis)
    last = lax.axis_index(pipe_axis) == lax.axis_size(pipe_axis) - 1
    total = lax.pmean(lax.psum(jnp.where(last, own, 0), pipe_axis), data_axis)
    gradients = jax.tree.map(lambda g: lax.pmean(g, data_axis), gradients)
    newest = jax.tree.map(lambda w, g: w - learning_rate * g, versions["newest"], gradients)
    return {"newest": newest, "older": versions["newest"]}, total
    ### END SOLUTION


# %% [markdown]
# ## In your own words
#
# Your pipeline runs 1F1B with 8 stages and 16 microbatches, and just fits into memory. A colleague wants ZB-H1 for its
# smaller bubble. How much shorter is a step if all three passes take the same time? Which stages need more memory than
# before, and does your SPMD program need more? What would you look at before you agree? A few sentences and one formula
# are enough.

# %% [markdown]
# ### BEGIN SOLUTION
# With three passes of length 1, 1F1B takes `3 (M + S - 1)` = 69 and ZB-H1 `3 M + S - 1` = 55: a fifth less. The time
# lost is `S - 1` instead of `3 (S - 1)`.
#
# In 1F1B stage `s` has `S - s` microbatches in flight; in ZB-H1 every stage has as many as the first one, 8. So the
# last stage needs much more than before, and the first one no more. In an SPMD program, all devices have buffers of the
# same size, that of the stage that needs most, so what the forward passes save takes no more than in 1F1B. What is new
# is what `I` leaves for `W`: up to 8 microbatches of it, on the last stage.
#
# I would measure `F`, `I` and `W`: the time lost is `(S - 1) (f + i - w)`, which gains little if `W` is much shorter
# than the others, as with attention, whose products have no weights. And I would look at what is pending, and at
# whether all devices have enough memory left for it.
# ### END SOLUTION

# %% [markdown]
# ## Lab: your orders
#
# Here are your own orders, drawn and measured. A pass through a part takes `1/R`; gradients of weights are green. The
# site's page on schedules has an explorer that draws any lines that you paste into it.

# %%
if __name__ == "__main__":
    own = {
        "1F1B": one_f_one_b(4, 8),
        "interleaved 1F1B": interleaved(4, 8, 2),
        "ZB-H1": zero_bubble(4, 8),
    }
    drawn = {"GPipe": gpipe(4, 8), **{name: written(lines, name=name) for name, lines in own.items()}}
    for name, schedule in drawn.items():
        cost = measure(run(schedule))
        flight = " ".join(f"{count:g}" for count in cost.activations)
        print(f"{name:17} a step takes {cost.time:4g}, bubble {cost.bubble:5.1%}, in flight {flight}")
    display(HTML("".join(schedule_svg(schedule) for schedule in drawn.values())))

# %% [markdown]
# ## Lab: the same gradients from all of them
#
# Your split layer runs in your executor on 4 stages (`data` x `pipe` = 2 x 4), with each of these tables, and is
# compared with a single-device run, whose loss is in brackets. The interleaved table has 8 parts instead of 4, so its
# model is a different one. Compiling them takes about 15 seconds.

# %%
if __name__ == "__main__":
    layer = split_backward(jax.nn.gelu)

    def problem(num_repeats, num_stages=4, width=16, hidden=32, rows=4):
        """Weights of all parts ``[num_repeats, num_stages, ...]``, and 8 microbatches of inputs and targets."""
        random, parts = np.random.default_rng(0), (num_repeats, num_stages)
        shapes = {"up": (*parts, width, hidden), "down": (*parts, hidden, width)}
        weights = {name: jnp.float32(0.2 * random.standard_normal(shape)) for name, shape in shapes.items()}
        return weights, *(jnp.float32(random.standard_normal((8, rows, width))) for _ in range(2))

    def squared(y, target):
        return jnp.mean(jnp.sum((y - target) ** 2, -1)) / 2

    def on_one_device(weights, inputs, targets):
        x = inputs
        for part in range(weights["up"].shape[0] * weights["up"].shape[1]):
            one = jax.tree.map(lambda leaf, part=part: leaf.reshape(-1, *leaf.shape[2:])[part], weights)
            x = layer[0](one, x)[0]
        return squared(x, targets)

    def as_a_table_says(table, mesh):
        def local(weights, inputs, targets):
            weights = jax.tree.map(lambda leaf: as_varying(leaf[:, 0], "data"), weights)
            inputs, targets = as_varying(inputs, "pipe"), as_varying(targets, "pipe")
            of = lambda y, microbatch: squared(y, targets[microbatch])  # noqa: E731
            loss, gradients = execute_schedule(layer, of, table, weights, inputs, "pipe")
            return loss[None], jax.tree.map(lambda g: g[None, :, None], gradients)

        specs = P(None, "pipe"), P(None, "data"), P(None, "data")
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P(("data", "pipe")), P("data", None, "pipe")))

    for name, schedule in drawn.items():
        weights, inputs, targets = problem(schedule.num_repeats)
        step = jax.jit(as_a_table_says(tabulate(schedule), make_mesh({"data": 2, "pipe": 4})))
        losses, gradients = jax.block_until_ready(step(weights, inputs, targets))
        loss, expected = jax.value_and_grad(on_one_device)(weights, inputs, targets)
        pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True)
        largest = max(float(jnp.max(jnp.abs(g.mean(0) - w)) / jnp.max(jnp.abs(w))) for g, w in pairs)
        print(f"{name:17} loss {losses.reshape(2, 4)[:, -1].mean():.5f} ({loss:.5f}), gradients apart by {largest:.0e}")

# %% [markdown]
# ## Lab: what each table costs
#
# Finally, the step time and a device's temporaries, predicted from the programs alone, for wide layers on 4 A100s. If
# gradients are added in place, as `sums.at[part].add(gradient)` does, ZB-H1 has the smallest bubble and the shortest
# step, and the interleaved schedule gains nothing over 1F1B: it has more ticks, each with its two permutes, and they
# cost as much as the smaller bubble saves. An update that reads and writes all parts can cost more than the difference
# between the schedules. GPipe needs the most memory and 1F1B the least. ZB-H1 keeps no more microbatches than the first
# stage of 1F1B, but has more pending. The hidden layers of the interleaved parts are half as wide, so that all four
# schedules do the same amount of work.

# %%
if __name__ == "__main__":
    for name, schedule in drawn.items():
        table = tabulate(schedule)
        mapped = as_a_table_says(table, abstract_mesh({"data": 1, "pipe": 4}))
        sizes = (schedule.num_repeats, 4, 1024, 4096 // schedule.num_repeats, 512)
        weights, inputs, targets = jax.eval_shape(partial(problem, *sizes))
        specs = {"weights": P(None, "pipe"), "inputs": P(None, "data"), "targets": P(None, "data")}

        def program(weights, inputs, targets, mapped=mapped):
            losses, gradients = mapped(weights, inputs, targets)
            return {"loss": losses, "gradients": gradients}

        exported = export(
            program,
            {"weights": weights, "inputs": inputs, "targets": targets},
            specs,
            mesh={"data": 1, "pipe": 4},
            out_specs={"loss": P(("data", "pipe")), "gradients": P("data", None, "pipe")},
        )
        prediction = predict(exported, "8xA100")
        figures = prediction.figures()
        print(f"{name:17} step {figures['step']}, temporaries {figures['temporaries']}")

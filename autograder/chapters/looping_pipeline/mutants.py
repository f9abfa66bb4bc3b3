"""Wrong answers for ``looping_pipeline``: mistakes that people have made, and the facts that they fail."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autograder.proof.mutants import mutant
from course.mesh import as_varying
from course.model import layer_key
from solutions.data_parallel import fold_key_over_axes
from solutions.looping_pipeline import execute_looping_pipeline


def _refuse(num_stages, num_repeats, num_layers):
    if num_layers % (num_stages * num_repeats):
        raise ValueError(f"{num_layers} layers on {num_stages} stages in {num_repeats} repeats do not come out even")
    return num_layers // (num_stages * num_repeats)


def gives_neighbouring_layers(stage, num_stages, num_repeats, num_layers):
    """A plain pipeline's layers, cut into repeats."""
    each = _refuse(num_stages, num_repeats, num_layers)
    first = stage * each * num_repeats
    return tuple(tuple(range(first + r * each, first + (r + 1) * each)) for r in range(num_repeats))


def joins_the_repeats(stage, num_stages, num_repeats, num_layers):
    """The right layers, in one tuple."""
    each = _refuse(num_stages, num_repeats, num_layers)
    starts = ((r * num_stages + stage) * each for r in range(num_repeats))
    return tuple(start + j for start in starts for j in range(each))


def leaves_layers_out(stage, num_stages, num_repeats, num_layers):
    """Rounds down, and nobody computes the last layers."""
    each = num_layers // (num_stages * num_repeats)
    starts = [(r * num_stages + stage) * each for r in range(num_repeats)]
    return tuple(tuple(range(start, start + each)) for start in starts)


def refuses_without_a_word(stage, num_stages, num_repeats, num_layers):
    if num_layers % (num_stages * num_repeats):
        raise ValueError("not divisible")
    return leaves_layers_out(stage, num_stages, num_repeats, num_layers)


def counts_layers_from_one(stage, num_stages, num_repeats, num_layers):
    each = _refuse(num_stages, num_repeats, num_layers)
    starts = [(r * num_stages + stage) * each + 1 for r in range(num_repeats)]
    return tuple(tuple(range(start, start + each)) for start in starts)


def _within(turn, period, num_microbatches, num_repeats):
    if turn < 0:
        return None
    repeat, microbatch = divmod(turn, period)
    return (microbatch, repeat) if microbatch < num_microbatches and repeat < num_repeats else None


def begins_everywhere_at_once(tick, stage, num_stages, num_microbatches, num_repeats):
    return _within(tick, max(num_microbatches, num_stages), num_microbatches, num_repeats)


def never_waits_for_the_first(tick, stage, num_stages, num_microbatches, num_repeats):
    """A repeat begins when all microbatches are in: right with as many of them as stages, or more."""
    return _within(tick - stage, num_microbatches, num_microbatches, num_repeats)


def waits_for_the_first_alone(tick, stage, num_stages, num_microbatches, num_repeats):
    """A repeat begins when the first microbatch is back: right with as many of them as stages, or fewer."""
    return _within(tick - stage, num_stages, num_microbatches, num_repeats)


def waits_for_the_last(tick, stage, num_stages, num_microbatches, num_repeats):
    """A repeat begins when the one before is over: no looping, but one pipeline after the other."""
    return _within(tick - stage, num_microbatches + num_stages - 1, num_microbatches, num_repeats)


def turns_the_pair_round(tick, stage, num_stages, num_microbatches, num_repeats):
    found = _within(tick - stage, max(num_microbatches, num_stages), num_microbatches, num_repeats)
    return found and found[::-1]


def _send(y, axis_name, num_stages):
    return lax.ppermute(y, axis_name, [(i, (i + 1) % num_stages) for i in range(num_stages)])


def looped(
    stage: Any, microbatches: Any, num_repeats: int, axis_name: str, *, period: int = 0, num_stages: int = 0,
    takes: Any = None, repeat_of: Any = None, microbatch_of: Any = None, send: Any = _send, more: int = 0
) -> Any:  # fmt: skip
    """The schedule with parts that can be replaced; ``more`` ticks at its end."""
    count, index = len(microbatches), lax.axis_index(axis_name)
    num_stages = num_stages or lax.axis_size(axis_name)
    period = period or max(count, num_stages)

    def tick(carry, t):
        waiting, arrived = carry
        back = (t - num_stages) % period
        slot = jnp.minimum(back, count - 1)
        returned = (t >= num_stages) & (back < count)
        waiting = waiting.at[slot].set(jnp.where(returned, arrived, waiting[slot]))
        since = jnp.maximum(t - index, 0)
        microbatch = jnp.minimum((microbatch_of or (lambda t, since: since % period))(t, since), count - 1)
        repeat = jnp.minimum((repeat_of or (lambda t, since: since // period))(t, since), num_repeats - 1)
        x = takes(waiting, arrived, microbatch) if takes else jnp.where(index == 0, waiting[microbatch], arrived)
        y = stage(x, microbatch, repeat)
        return (waiting, send(y, axis_name, num_stages)), y

    start = microbatches, jnp.zeros_like(microbatches[0])
    ticks = jnp.arange((num_repeats - 1) * period + count + num_stages - 1 + more)
    _, outputs = lax.scan(tick, start, ticks)
    return outputs[len(outputs) - more - count :][:count]


def drains_between_repeats(stage, microbatches, num_repeats, axis_name):
    """One plain pipeline after the other."""
    period = len(microbatches) + lax.axis_size(axis_name) - 1
    return looped(stage, microbatches, num_repeats, axis_name, period=period)


def begins_a_repeat_too_early(stage, microbatches, num_repeats, axis_name):
    """As soon as all microbatches are in: right with as many of them as stages, or more."""
    return looped(stage, microbatches, num_repeats, axis_name, period=len(microbatches))


def has_four_stages(stage, microbatches, num_repeats, axis_name):
    return looped(stage, microbatches, num_repeats, axis_name, num_stages=4)


def gathers_the_outputs(stage, microbatches, num_repeats, axis_name):
    """Gives every stage what the last one has."""
    outputs = execute_looping_pipeline(stage, microbatches, num_repeats, axis_name)
    return lax.all_gather(outputs, axis_name)[-1]


def runs_a_tick_too_many(stage, microbatches, num_repeats, axis_name):
    return looped(stage, microbatches, num_repeats, axis_name, more=1)


def take(tree: Any, at: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[at], tree)


def layers_of(model: Any, key: Any, pipe_axis: str, key_of: Any = layer_key) -> Callable[..., Any]:
    """A stage's layers of one repeat."""

    def stage(weights, x, microbatch, repeat):
        count = len(jax.tree.leaves(weights)[0])
        first = (repeat * lax.axis_size(pipe_axis) + lax.axis_index(pipe_axis)) * count

        for j in range(count):
            x = model.layer(take(weights, j), x, key_of(key, microbatch, first + j))
        return x

    return stage


def cut(x: Any, num_microbatches: int) -> Any:
    return x.reshape(num_microbatches, -1, *x.shape[1:])


def last_stage_loss(params: Any, outputs: Any, batch: Any, model: Any, pipe_axis: str) -> Any:
    loss = model.loss(params["head"], outputs.reshape(-1, *outputs.shape[2:]), batch["targets"])
    return jnp.where(lax.axis_index(pipe_axis) == lax.axis_size(pipe_axis) - 1, loss, 0)


def update(loss_of, params, axes, learning_rate, *, layers=None, ends=None, loss_axes=None):
    """Gradients of ``loss_of``, reduced where ``layers`` and ``ends`` say how, and SGD."""
    loss, gradients = jax.value_and_grad(loss_of)(params)
    for part in ("embed", "head"):
        gradients[part] = jax.tree.map(ends or (lambda g: lax.psum(g, axes)), gradients[part])
    if layers:
        gradients["layers"] = jax.tree.map(layers, gradients["layers"])
    return jax.tree.map(lambda p, g: p - learning_rate * g, params, gradients), lax.psum(loss, loss_axes or axes)


def in_one_scan(
    params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate, *, execute=None, remat=True,
    enter=None, layers=None, share=None
):  # fmt: skip
    """One scan over all ticks, and one reduction after the whole backward pass."""
    key = fold_key_over_axes(key, (data_axis,))
    axes, stage = (pipe_axis, data_axis), layers_of(model, key, pipe_axis)
    pipelines, repeats = lax.axis_size(data_axis), len(jax.tree.leaves(params["layers"])[0])

    def loss_of(params):
        def of_repeat(stack, x, microbatch, repeat):
            weights = take(stack, repeat)
            return stage(enter(weights) if enter else weights, x, microbatch, repeat)

        compute = partial(jax.checkpoint(of_repeat) if remat else of_repeat, params["layers"])
        x = cut(model.embed(params["embed"], batch["inputs"]), num_microbatches)
        outputs = (execute or execute_looping_pipeline)(compute, x, repeats, pipe_axis)
        return last_stage_loss(params, outputs, batch, model, pipe_axis) / (share or pipelines)

    reduce = layers or (None if enter else lambda g: lax.psum(g, data_axis))
    return update(loss_of, params, axes, learning_rate, layers=reduce)


def averages_after_the_backward_pass(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """The obvious step: right, and every reduction has nothing left to hide behind."""
    return in_one_scan(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate)


def entering(axis_name: str, reduce: Callable[..., Any] = lax.psum) -> Callable[[Any], Any]:
    """Nothing forward; backward, gradients are reduced over the axis."""

    @jax.custom_vjp
    def enter(weights):
        return weights

    def backward(_, gradients):
        return (jax.tree.map(lambda g: as_varying(reduce(g, axis_name), axis_name), gradients),)

    enter.defvjp(lambda weights: (weights, None), backward)
    return enter


def averages_in_every_tick(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """The weights enter where they are used, so that each tick's share of the gradients is reduced."""
    return in_one_scan(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate,
                       enter=entering(data_axis))  # fmt: skip


def in_blocks(
    params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate, *, enter=None, remat="choice",
    knows_late=True, key_of=layer_key, twice=False, ends=None, share=None, period=0, stack_enters=False, loss_axes=None,
    own_key=True
):  # fmt: skip
    """The reference, with parts that can be replaced."""
    num_stages, index = lax.axis_size(pipe_axis), lax.axis_index(pipe_axis)
    repeats = len(jax.tree.leaves(params["layers"])[0])
    period = period or max(num_microbatches, num_stages)
    ring = [(i, (i + 1) % num_stages) for i in range(num_stages)]
    key = fold_key_over_axes(key, (data_axis,) if own_key else ())
    stage, enter = layers_of(model, key, pipe_axis, key_of), enter or entering(data_axis)

    def chosen(two, x, late, microbatch, repeat):
        return stage(take(two, 1 - late), x, microbatch, repeat)

    def run(two, start, block, num_ticks):
        def tick(carry, local):
            waiting, arrived = carry
            t = block * period + local
            back = (t - num_stages) % period
            slot = jnp.minimum(back, num_microbatches - 1)
            returned = (t >= num_stages) & (back < num_microbatches)
            waiting = waiting.at[slot].set(jnp.where(returned, arrived, waiting[slot]))
            microbatch = jnp.minimum((t - index) % period, num_microbatches - 1)
            late = (local < index).astype(jnp.int32)
            x, repeat = jnp.where(index == 0, waiting[microbatch], arrived), jnp.maximum(block - late, 0)
            late = late if knows_late else jnp.zeros_like(late)
            if remat == "layers":
                y = jax.checkpoint(stage)(take(two, 1 - late), x, microbatch, repeat)
            else:
                y = (jax.checkpoint(chosen) if remat else chosen)(two, x, late, microbatch, repeat)
            return (waiting, lax.ppermute(y, pipe_axis, ring)), y

        return lax.scan(tick, start, jnp.arange(num_ticks))

    run = jax.jit(run, static_argnums=3)

    def loss_of(params):
        x = cut(model.embed(params["embed"], batch["inputs"]), num_microbatches)
        carry, outputs, before = (x, jnp.zeros_like(x[0])), x, None
        stack = enter(params["layers"]) if stack_enters else params["layers"]
        for repeat in range(repeats):
            weights = take(stack, repeat) if twice or stack_enters else enter(take(stack, repeat))
            two = jax.tree.map(lambda *leaves: jnp.stack(leaves), before or weights, weights)
            num_ticks = period if repeat < repeats - 1 else num_microbatches + num_stages - 1
            carry, outputs = run(enter(two) if twice else two, carry, repeat, num_ticks)
            before = weights
        loss = last_stage_loss(params, outputs[-num_microbatches:], batch, model, pipe_axis)
        return loss / (share or lax.axis_size(data_axis))

    return update(loss_of, params, (pipe_axis, data_axis), learning_rate, ends=ends, loss_axes=loss_axes)


def averages_every_repeat_twice(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """Both repeats' weights enter each block: a repeat's two halves are reduced apart."""
    return in_blocks(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate, twice=True)


def keeps_all_activations(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """No recomputation."""
    return in_blocks(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate, remat="")


def drops_alike_in_every_pipeline(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    return in_blocks(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate, own_key=False)


def drains_between_repeats_in_step(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """One plain pipeline after the other: longer, and nothing else is wrong."""
    period = num_microbatches + lax.axis_size(pipe_axis) - 1
    return in_blocks(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate, period=period)


def gathers_the_outputs_in_step(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """Every stage is given the last one's outputs, for a loss that one of them would do."""

    def execute(stage, x, repeats, axis_name):
        outputs = execute_looping_pipeline(stage, x, repeats, axis_name)
        return lax.all_gather(outputs, axis_name)[-1]

    return in_one_scan(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate,
                       execute=execute)  # fmt: skip


MUTANTS = (
    mutant("layers_of_stage", gives_neighbouring_layers, "values"),
    mutant("layers_of_stage", joins_the_repeats, "values"),
    mutant("layers_of_stage", leaves_layers_out, "values"),
    mutant("layers_of_stage", refuses_without_a_word, "values"),
    mutant("layers_of_stage", counts_layers_from_one, "values"),
    mutant("loop_position", begins_everywhere_at_once, "values"),
    mutant("loop_position", never_waits_for_the_first, "values", shown_by=("4 stages, 2 microbatches, 3 repeats",)),
    mutant("loop_position", waits_for_the_first_alone, "values"),
    mutant("loop_position", waits_for_the_last, "values"),
    mutant("loop_position", turns_the_pair_round, "values"),
    mutant("execute_looping_pipeline", drains_between_repeats, "bubble", "permute bytes"),
    mutant(
        "execute_looping_pipeline",
        begins_a_repeat_too_early,
        "bubble",
        "gradients",
        "values",
        shown_by=("data=2 x pipe=4, 2 microbatches",),
    ),
    mutant("execute_looping_pipeline", has_four_stages, "gradients", "values", shown_by=("pipe=8, 8 microbatches",)),
    mutant("execute_looping_pipeline", gathers_the_outputs, "other collectives"),
    mutant("execute_looping_pipeline", runs_a_tick_too_many, "bubble", "permute bytes"),
    mutant("looping_train_step", averages_after_the_backward_pass, "exposed over data"),
    mutant("looping_train_step", averages_in_every_tick, "bytes over data", "exposed over data", "predicted time"),
    mutant("looping_train_step", averages_every_repeat_twice, "bytes over data"),
    mutant("looping_train_step", keeps_all_activations, "live temporaries"),
    mutant(
        "looping_train_step",
        drops_alike_in_every_pipeline,
        "gradient norm",
        "gradients",
        "values",
        shown_by=("replica=2 x stage=4, 2 microbatches",),
    ),
    mutant("looping_train_step", drains_between_repeats_in_step, "permute bytes"),
    mutant("looping_train_step", gathers_the_outputs_in_step, "exposed over data", "other collectives"),
)

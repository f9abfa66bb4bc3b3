"""Wrong answers for ``looping_train_step``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autograder.chapters.looping_pipeline.mutants.names import (
    EXPOSED,
    GRADIENTS,
    OTHERS,
    OVER_DATA,
    PERMUTED,
    TEMPORARIES,
    TIME,
    VALUES,
    WRONG,
)
from autograder.proof.mutants import mutant
from course.mesh import as_varying
from course.model import layer_key
from solutions.data_parallel import fold_key_over_axes
from solutions.looping_pipeline import execute_looping_pipeline, looping_train_step

NAME = "looping_train_step"


def entering(axis_name: str, reduce: Callable[..., Any] = lax.psum) -> Callable[[Any], Any]:
    """Nothing forward; backward, gradients are reduced over the axis."""

    @jax.custom_vjp
    def enter(weights):
        return weights

    def backward(_, gradients):
        return (jax.tree.map(lambda g: as_varying(reduce(g, axis_name), axis_name), gradients),)

    enter.defvjp(lambda weights: (weights, None), backward)
    return enter


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


def averages_the_stack_at_once(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """In blocks, but all weights enter together, before the first: what flows back is complete after the last."""
    return in_blocks(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate,
                     stack_enters=True)  # fmt: skip


def averages_every_repeat_twice(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """Both repeats' weights enter each block: a repeat's two halves are reduced apart."""
    return in_blocks(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate, twice=True)


def keeps_all_activations(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """No recomputation."""
    return in_blocks(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate, remat="")


def keeps_the_chosen_weights(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """Recomputes the layers, with weights that were chosen outside: they are kept for every tick."""
    return in_blocks(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate, remat="layers")


def uses_one_repeats_weights_in_a_block(
    params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate
):
    """Forgets that later stages are late."""
    return in_blocks(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate, knows_late=False)


def drops_alike_in_every_microbatch(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    def key_of(key, microbatch, layer):
        return layer_key(key, 0, layer)

    return in_blocks(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate, key_of=key_of)


def drops_alike_in_every_pipeline(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    return in_blocks(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate, own_key=False)


def drops_by_stage(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """Takes the stage for the number of the layer: alike in every repeat."""

    def key_of(key, microbatch, layer):
        return layer_key(key, microbatch, lax.axis_index(pipe_axis))

    return in_blocks(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate, key_of=key_of)


def sums_over_pipelines(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    return in_blocks(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate, share=1)


def averages_over_stages_too(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    share = lax.axis_size(data_axis) * lax.axis_size(pipe_axis)
    return in_blocks(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate, share=share)


def lets_the_pipelines_drift(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """Nobody averages the layers."""
    return in_blocks(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate,
                     enter=lambda weights: weights)  # fmt: skip


def lets_the_ends_drift(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """Embedding and head are averaged over data, and the other stages never hear of it."""
    return in_blocks(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate,
                     ends=lambda g: as_varying(lax.psum(g, data_axis), data_axis))  # fmt: skip


def averages_in_bfloat16(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    def reduce(gradient, axis_name):
        return lax.psum(gradient.astype(jnp.bfloat16), axis_name).astype(gradient.dtype)

    return in_blocks(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate,
                     enter=entering(data_axis, reduce))  # fmt: skip


def drains_between_repeats(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """One plain pipeline after the other: longer, and nothing else is wrong."""
    period = num_microbatches + lax.axis_size(pipe_axis) - 1
    return in_blocks(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate, period=period)


def gathers_the_outputs(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """Every stage is given the last one's outputs, for a loss that one of them would do."""

    def execute(stage, x, repeats, axis_name):
        outputs = execute_looping_pipeline(stage, x, repeats, axis_name)
        return lax.all_gather(outputs, axis_name)[-1]

    return in_one_scan(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate,
                       execute=execute)  # fmt: skip


def reports_its_own_loss(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """Updates rightly, and gives the loss of its own pipeline."""
    return in_blocks(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate,
                     loss_axes=(pipe_axis,))  # fmt: skip


def climbs(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate):
    """Adds the gradient."""
    return looping_train_step(params, batch, key, model, num_microbatches, pipe_axis, data_axis, -learning_rate)


_DROPS = ("replica=2 x stage=4, 2 microbatches",)
MUTANTS = (
    mutant(NAME, averages_after_the_backward_pass, EXPOSED),
    mutant(NAME, averages_in_every_tick, EXPOSED, OVER_DATA, TIME),
    mutant(NAME, averages_the_stack_at_once, EXPOSED),
    mutant(NAME, averages_every_repeat_twice, OVER_DATA),
    mutant(NAME, keeps_all_activations, TEMPORARIES),
    mutant(NAME, keeps_the_chosen_weights, TEMPORARIES),
    mutant(NAME, uses_one_repeats_weights_in_a_block, *WRONG),
    mutant(NAME, drops_alike_in_every_microbatch, *WRONG, shown_by=_DROPS),
    mutant(NAME, drops_alike_in_every_pipeline, *WRONG, shown_by=_DROPS),
    mutant(NAME, drops_by_stage, *WRONG, shown_by=_DROPS),
    mutant(NAME, sums_over_pipelines, *WRONG),
    mutant(NAME, averages_over_stages_too, *WRONG),
    mutant(NAME, lets_the_pipelines_drift, *WRONG, OVER_DATA),
    mutant(NAME, lets_the_ends_drift, *WRONG),
    mutant(NAME, averages_in_bfloat16, *WRONG, OVER_DATA),
    mutant(NAME, drains_between_repeats, PERMUTED),
    mutant(NAME, gathers_the_outputs, EXPOSED, OTHERS),
    mutant(NAME, reports_its_own_loss, VALUES),
    mutant(NAME, climbs, VALUES, GRADIENTS),
)

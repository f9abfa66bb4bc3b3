"""Wrong answers for ``fsdp_train_step``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autograder.chapters.fsdp.mutants.loss import layer_specs
from autograder.chapters.fsdp.mutants.names import (
    AVERAGED,
    GATHERED,
    GRADIENTS,
    NORM,
    SCATTERED,
    TEMPORARIES,
    TIME,
    VALUES,
)
from autograder.proof.mutants import mutant
from course.mesh import as_varying
from course.model import full_loss
from solutions.fsdp import fsdp_loss, fsdp_train_step, gather_params


def mean_of_whole(gradients: Any, specs: Any, axis_name: str) -> Any:
    return jax.tree.map(lambda g, spec: g if axis_name in spec else lax.pmean(g, axis_name), gradients, specs)


def _updated(shards: Any, specs: Any, gradients: Any, axis_name: str, learning_rate: Any) -> Any:
    mean = mean_of_whole(gradients, specs, axis_name)
    return jax.tree.map(lambda part, g: part - learning_rate * g, shards, mean)


def _by_autodiff(loss_of: Any, shards: Any, specs: Any, axis_name: str, learning_rate: Any) -> Any:
    loss, gradients = jax.value_and_grad(loss_of)(shards)
    return _updated(shards, specs, gradients, axis_name, learning_rate), lax.pmean(loss, axis_name)


def _take(stack: Any, at: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[at], stack)


def _scatter(gradients: Any, specs: Any, axis_name: str, divide: bool = True) -> Any:
    def split(g, spec):
        if axis_name not in spec:
            return g
        total = lax.psum_scatter(g, axis_name, scatter_dimension=spec.index(axis_name), tiled=True)
        return total / lax.axis_size(axis_name) if divide else total

    return jax.tree.map(split, gradients, specs)


def _back(model: Any, whole: Any, x: Any, gradient: Any) -> Any:
    return jax.vjp(model.layer, whole, x)[1](gradient)


def _forward(stack: Any, x: Any, gather: Any, model: Any) -> Any:
    """All layers, the next one's weights in the carry; and what the backward pass needs."""

    def step(carry, part):
        x, whole = carry
        return (model.layer(whole, x), gather(part)), x

    (x, whole), inputs = lax.scan(step, (x, gather(_take(stack, 0))), _take(stack, slice(1, None)))
    return model.layer(whole, x), (inputs, x, whole)


def _by_hand(shards, specs, batch, model, axis_name, learning_rate, backward, gather=gather_params, forward=_forward):
    """A step whose layers have the given backward pass, ``(saved, gradient, gather) -> gradients of parts and x``."""
    own = layer_specs(specs)

    def gather_layer(part):
        return gather(part, own, axis_name)

    def embed(part):
        return model.embed(gather(part, specs["embed"], axis_name), batch["inputs"])

    def head(part, x):
        return model.loss(gather(part, specs["head"], axis_name), x, batch["targets"])

    x, of_embed = jax.vjp(embed, shards["embed"])
    x, saved = forward(shards["layers"], x, gather_layer, model)
    loss, (of_head, gradient) = jax.value_and_grad(head, argnums=(0, 1))(shards["head"], x)
    of_layers, gradient = backward((shards["layers"], *saved), gradient, gather_layer)
    gradients = {"embed": of_embed(gradient)[0], "layers": of_layers, "head": of_head}
    return _updated(shards, specs, gradients, axis_name, learning_rate), lax.pmean(loss, axis_name)


def _prefetched(
    model: Any,
    specs: Any,
    axis_name: str,
    *,
    divide: bool = True,
    stale: bool = False,
    shift: int = 0,
    before: Any = None,
):
    """The right backward pass, with room for mistakes."""
    own = layer_specs(specs)

    def scatter(gradients):
        if before:
            gradients = jax.tree.map(lambda g, spec: before(g) if axis_name in spec else g, gradients, own)
        return _scatter(gradients, own, axis_name, divide)

    def backward(saved, gradient, gather):
        stack, inputs, x, whole = saved

        def step(carry, layer):
            gradient, whole = carry
            part, x = layer
            coming = gather(part)
            of_whole, gradient = _back(model, coming if stale else whole, x, gradient)
            return (gradient, coming), scatter(of_whole)

        layers = _take(stack, slice(-1)), jnp.concatenate([inputs[1:], x[None]])
        (gradient, whole), done = lax.scan(step, (gradient, whole), layers, reverse=True)
        first, gradient = _back(model, whole, inputs[0], gradient)
        every = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), scatter(first), done)
        return jax.tree.map(lambda leaf: jnp.roll(leaf, shift, 0), every) if shift else every, gradient

    return backward


def gathers_when_it_computes(shards, specs, batch, model, axis_name, learning_rate):
    """The derivative of ``fsdp_loss``: every layer waits for its gather, and its gradient for the reduce-scatter."""
    return _by_autodiff(
        lambda parts: fsdp_loss(parts, specs, batch, model, axis_name), shards, specs, axis_name, learning_rate
    )


def prefetches_forward_only(shards, specs, batch, model, axis_name, learning_rate):
    """Gathers ahead in the forward pass; the backward pass gathers when it computes."""
    own = layer_specs(specs)

    def backward(saved, gradient, gather):
        stack, inputs, x, _ = saved

        def step(gradient, layer):
            part, x = layer
            of_whole, gradient = _back(model, gather(part), x, gradient)
            return gradient, _scatter(of_whole, own, axis_name)

        every = jnp.concatenate([inputs, x[None]])
        return lax.scan(step, gradient, (stack, every), reverse=True)[::-1]

    return _by_hand(shards, specs, batch, model, axis_name, learning_rate, backward)


def keeps_gathered_weights(shards, specs, batch, model, axis_name, learning_rate):
    """Gathers ahead and leaves the backward pass to JAX, which saves the carry: every layer, whole."""
    own = layer_specs(specs)

    def loss_of(shards):
        x = model.embed(gather_params(shards["embed"], specs["embed"], axis_name), batch["inputs"])
        x, _ = _forward(shards["layers"], x, lambda part: gather_params(part, own, axis_name), model)
        return model.loss(gather_params(shards["head"], specs["head"], axis_name), x, batch["targets"])

    return _by_autodiff(loss_of, shards, specs, axis_name, learning_rate)


def keeps_the_carry_of_a_checkpoint(shards, specs, batch, model, axis_name, learning_rate):
    """The same with ``jax.checkpoint`` around the iteration, whose inputs are saved: the weights are among them."""
    own = layer_specs(specs)

    @jax.checkpoint
    def step(carry, part):
        x, whole = carry
        return (model.layer(whole, x), gather_params(part, own, axis_name)), None

    def loss_of(shards):
        stack = shards["layers"]
        x = model.embed(gather_params(shards["embed"], specs["embed"], axis_name), batch["inputs"])
        first = gather_params(_take(stack, 0), own, axis_name)
        (x, whole), _ = lax.scan(step, (x, first), _take(stack, slice(1, None)))
        x = model.layer(whole, x)
        return model.loss(gather_params(shards["head"], specs["head"], axis_name), x, batch["targets"])

    return _by_autodiff(loss_of, shards, specs, axis_name, learning_rate)


def gathers_everything_first(shards, specs, batch, model, axis_name, learning_rate):
    """The whole model at once: data parallelism with parts."""
    return _by_autodiff(
        lambda parts: full_loss(model, gather_params(parts, specs, axis_name), batch),
        shards,
        specs,
        axis_name,
        learning_rate,
    )


def gathers_round_the_end(shards, specs, batch, model, axis_name, learning_rate):
    """No code for first and last layers: both scans gather one layer more, for nobody."""
    own = layer_specs(specs)

    def forward(stack, x, gather, model):
        def step(carry, part):
            x, whole = carry
            coming = gather(part)
            return (model.layer(whole, x), coming), x

        after = jax.tree.map(lambda leaf: jnp.roll(leaf, -1, 0), stack)
        (x, _), inputs = lax.scan(step, (x, gather(_take(stack, 0))), after)
        return x, (inputs,)

    def backward(saved, gradient, gather):
        stack, inputs = saved

        def step(carry, layer):
            gradient, whole = carry
            part, x = layer
            coming = gather(part)
            of_whole, gradient = _back(model, whole, x, gradient)
            return (gradient, coming), _scatter(of_whole, own, axis_name)

        before = jax.tree.map(lambda leaf: jnp.roll(leaf, 1, 0), stack)
        carry = (gradient, gather(_take(stack, -1)))
        (gradient, _), done = lax.scan(step, carry, (before, inputs), reverse=True)
        return done, gradient

    return _by_hand(shards, specs, batch, model, axis_name, learning_rate, backward, forward=forward)


def divides_before_it_sends(shards, specs, batch, model, axis_name, learning_rate):
    """Divides whole gradients: as many times the work as there are devices, and transfers must wait for it."""
    size = lax.axis_size(axis_name)
    right = _prefetched(model, specs, axis_name, divide=False, before=lambda g: g / size)
    return _by_hand(shards, specs, batch, model, axis_name, learning_rate, right)


def sums_over_devices(shards, specs, batch, model, axis_name, learning_rate):
    """The reduce-scatter of layers sums; those of embedding and head are means."""
    backward = _prefetched(model, specs, axis_name, divide=False)
    return _by_hand(shards, specs, batch, model, axis_name, learning_rate, backward)


def computes_with_what_is_coming(shards, specs, batch, model, axis_name, learning_rate):
    """Off by one: a layer's backward pass runs with the weights of the layer before."""
    backward = _prefetched(model, specs, axis_name, stale=True)
    return _by_hand(shards, specs, batch, model, axis_name, learning_rate, backward)


def hands_gradients_to_the_next_layer(shards, specs, batch, model, axis_name, learning_rate):
    """Off by one: every layer is updated with the gradient of the layer before."""
    backward = _prefetched(model, specs, axis_name, shift=1)
    return _by_hand(shards, specs, batch, model, axis_name, learning_rate, backward)


def gathers_in_bfloat16(shards, specs, batch, model, axis_name, learning_rate):
    """Half of the bytes, and a few digits fewer."""

    def gather(part, part_specs, axis_name):
        low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), part)
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gather_params(low, part_specs, axis_name))

    backward = _prefetched(model, specs, axis_name)
    return _by_hand(shards, specs, batch, model, axis_name, learning_rate, backward, gather)


def forgets_whole_leaves(shards, specs, batch, model, axis_name, learning_rate):
    """Leaves that stay whole are updated with each device's own gradient, and drift apart."""
    loss, gradients = jax.value_and_grad(fsdp_loss)(shards, specs, batch, model, axis_name)
    updated = jax.tree.map(lambda part, g: part - learning_rate * g, shards, gradients)
    return updated, lax.pmean(loss, axis_name)


def averages_parts_too(shards, specs, batch, model, axis_name, learning_rate):
    """A mean over all gradients at the end, which mixes different parts of a leaf."""
    loss, gradients = jax.value_and_grad(fsdp_loss)(shards, specs, batch, model, axis_name)
    mean = lax.pmean(gradients, axis_name)
    return jax.tree.map(lambda part, g: part - learning_rate * g, shards, mean), lax.pmean(loss, axis_name)


def averages_whole_leaves_twice(shards, specs, batch, model, axis_name, learning_rate):
    """Once where they are found and once at the end: the same numbers, twice the messages."""

    def once_more(shards, updated):
        mean = jax.tree.map(lambda old, new: (old - new) / learning_rate, shards, updated)
        return mean_of_whole(jax.tree.map(lambda g: as_varying(g, axis_name), mean), specs, axis_name)

    updated, loss = fsdp_train_step(shards, specs, batch, model, axis_name, learning_rate)
    return jax.tree.map(lambda part, g: part - learning_rate * g, shards, once_more(shards, updated)), loss


def reports_its_own_loss(shards, specs, batch, model, axis_name, learning_rate):
    """Updates rightly, and gives the loss of its own rows."""
    updated, _ = fsdp_train_step(shards, specs, batch, model, axis_name, learning_rate)
    return updated, fsdp_loss(shards, specs, batch, model, axis_name)


def climbs(shards, specs, batch, model, axis_name, learning_rate):
    """Adds the gradient."""
    return fsdp_train_step(shards, specs, batch, model, axis_name, -learning_rate)


def forgets_the_learning_rate(shards, specs, batch, model, axis_name, learning_rate):
    return fsdp_train_step(shards, specs, batch, model, axis_name, jnp.float32(0.1))


WRONG = (VALUES, GRADIENTS, NORM)
MUTANTS = (
    mutant("fsdp_train_step", gathers_when_it_computes, TIME),
    mutant("fsdp_train_step", prefetches_forward_only, TIME),
    mutant("fsdp_train_step", keeps_gathered_weights, TEMPORARIES, TIME),
    mutant("fsdp_train_step", keeps_the_carry_of_a_checkpoint, TEMPORARIES),
    mutant("fsdp_train_step", divides_before_it_sends, TIME),
    mutant("fsdp_train_step", gathers_everything_first, TEMPORARIES, TIME),
    mutant("fsdp_train_step", gathers_round_the_end, GATHERED),
    mutant("fsdp_train_step", sums_over_devices, *WRONG),
    mutant("fsdp_train_step", computes_with_what_is_coming, *WRONG, TIME),
    mutant("fsdp_train_step", hands_gradients_to_the_next_layer, VALUES, GRADIENTS),
    mutant("fsdp_train_step", gathers_in_bfloat16, *WRONG, GATHERED, SCATTERED, TIME),
    mutant("fsdp_train_step", forgets_whole_leaves, *WRONG, AVERAGED, TIME),
    mutant("fsdp_train_step", averages_parts_too, *WRONG, AVERAGED, TIME),
    mutant("fsdp_train_step", averages_whole_leaves_twice, AVERAGED),
    mutant("fsdp_train_step", reports_its_own_loss, VALUES, GATHERED, AVERAGED, TIME),
    mutant("fsdp_train_step", climbs, VALUES, GRADIENTS),
    mutant("fsdp_train_step", forgets_the_learning_rate, *WRONG),
)

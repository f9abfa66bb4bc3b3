"""Right answers for ``fsdp_loss`` in another style: how layers follow each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from solutions.fsdp import gather_params


def layer_specs(specs):
    """One layer's specs: those of the stacked leaves without their first entry."""
    return jax.tree.map(lambda spec: P(*spec[1:]), specs["layers"])


def ends(shards, specs, batch, model, axis_name):
    """The embedding's result, and what makes a loss of the last layer's: a helper from another cell."""
    embed = jax.checkpoint(lambda part, rows: model.embed(gather_params(part, specs["embed"], axis_name), rows))
    head = jax.checkpoint(lambda part, x, y: model.loss(gather_params(part, specs["head"], axis_name), x, y))
    return embed(shards["embed"], batch["inputs"]), lambda x: head(shards["head"], x, batch["targets"])


def unrolled(shards, specs, batch, model, axis_name):
    """A Python loop over layers."""
    x, loss = ends(shards, specs, batch, model, axis_name)
    own = layer_specs(specs)
    layer = jax.checkpoint(lambda part, x: model.layer(gather_params(part, own, axis_name), x))
    for i in range(model.num_layers):
        x = layer(jax.tree.map(lambda leaf: leaf[i], shards["layers"]), x)  # noqa: B023
    return loss(x)


def unrolled_inside_checkpoint(shards, specs, batch, model, axis_name):
    """A Python loop whose checkpointed function takes the stack and a number, and cuts its layer out itself."""
    x, loss = ends(shards, specs, batch, model, axis_name)
    own = layer_specs(specs)

    @partial(jax.checkpoint, static_argnums=(2,))
    def layer(stack, x, number):
        part = jax.tree.map(lambda leaf: lax.index_in_dim(leaf, number, keepdims=False), stack)
        return model.layer(gather_params(part, own, axis_name), x)

    for number in range(model.num_layers):
        x = layer(shards["layers"], x, number)
    return loss(x)


def unrolled_by_scan(shards, specs, batch, model, axis_name):
    """``lax.scan(..., unroll=True)``."""
    x, loss = ends(shards, specs, batch, model, axis_name)
    own = layer_specs(specs)

    @jax.checkpoint
    def layer(x, part):
        return model.layer(gather_params(part, own, axis_name), x), None

    return loss(lax.scan(layer, x, shards["layers"], unroll=True)[0])


def by_recursion(shards, specs, batch, model, axis_name):
    """The first layer, then the rest of the stack, until nothing is left."""
    x, loss = ends(shards, specs, batch, model, axis_name)
    own = layer_specs(specs)
    layer = jax.checkpoint(lambda part, x: model.layer(gather_params(part, own, axis_name), x))

    def run(stack, x):
        if jax.tree.leaves(stack)[0].shape[0] == 0:
            return x
        first = jax.tree.map(lambda leaf: leaf[0], stack)
        return run(jax.tree.map(lambda leaf: leaf[1:], stack), layer(first, x))

    return loss(run(shards["layers"], x))


def by_reducing(shards, specs, batch, model, axis_name):
    """``functools.reduce`` over a list of layers that ``jnp.unstack`` gives."""
    x, loss = ends(shards, specs, batch, model, axis_name)
    own = layer_specs(specs)
    leaves, tree = jax.tree.flatten(shards["layers"])
    layers = [tree.unflatten(layer) for layer in zip(*map(jnp.unstack, leaves), strict=True)]
    return loss(reduce(jax.checkpoint(lambda x, part: model.layer(gather_params(part, own, axis_name), x)), layers, x))


def by_counting(shards, specs, batch, model, axis_name):
    """``fori_loop`` with the layer's number."""
    x, loss = ends(shards, specs, batch, model, axis_name)
    own = layer_specs(specs)

    @jax.checkpoint
    def layer(i, x):
        part = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, i, keepdims=False), shards["layers"])
        return model.layer(gather_params(part, own, axis_name), x)

    return loss(lax.fori_loop(0, model.num_layers, layer, x))


def by_scanning_numbers(shards, specs, batch, model, axis_name):
    """A scan over layer numbers, with the stack in the carry."""
    x, loss = ends(shards, specs, batch, model, axis_name)
    own = layer_specs(specs)

    @jax.checkpoint
    def layer(stack, i, x):
        return model.layer(gather_params(jax.tree.map(lambda leaf: leaf[i], stack), own, axis_name), x)

    def step(carry, i):
        x, stack = carry
        return (layer(stack, i, x), stack), None

    return loss(lax.scan(step, (x, shards["layers"]), jnp.arange(model.num_layers))[0][0])


@dataclass(frozen=True)
class _Stage:
    """A pure function of whole parameters, run on parts."""

    compute: Callable[..., jax.Array]
    specs: Any
    axis_name: str

    def __call__(self, part: Any, *arguments: jax.Array) -> jax.Array:
        return jax.checkpoint(self.gathered)(part, *arguments)

    def gathered(self, part: Any, *arguments: jax.Array) -> jax.Array:
        return self.compute(gather_params(part, self.specs, self.axis_name), *arguments)


def with_dataclasses(shards, specs, batch, model, axis_name):
    """A dataclass with ``__call__`` for each stage."""
    embed = _Stage(model.embed, specs["embed"], axis_name)
    layer = _Stage(model.layer, layer_specs(specs), axis_name)
    head = _Stage(model.loss, specs["head"], axis_name)
    x, _ = lax.scan(lambda x, part: (layer(part, x), None), embed(shards["embed"], batch["inputs"]), shards["layers"])
    return head(shards["head"], x, batch["targets"])


class _Sharded(nnx.Module):
    """A stage as a module: its parameters are parts, and every call gathers."""

    def __init__(self, part, specs, compute, axis_name):
        leaves, self.tree = jax.tree.flatten(part)
        self.parts = nnx.List([nnx.Param(leaf) for leaf in leaves])
        self.specs, self.compute, self.axis_name = nnx.static(specs), compute, axis_name

    @nnx.remat
    def __call__(self, *arguments):
        part = self.tree.unflatten([param[...] for param in self.parts])
        return self.compute(gather_params(part, self.specs, self.axis_name), *arguments)


def with_modules(shards, specs, batch, model, axis_name):
    """``nnx`` modules and ``nnx.remat``, layer by layer."""
    x = _Sharded(shards["embed"], specs["embed"], model.embed, axis_name)(batch["inputs"])
    for i in range(model.num_layers):
        part = jax.tree.map(lambda leaf: leaf[i], shards["layers"])  # noqa: B023
        x = _Sharded(part, layer_specs(specs), model.layer, axis_name)(x)
    return _Sharded(shards["head"], specs["head"], model.loss, axis_name)(x, batch["targets"])


def by_composing(shards, specs, batch, model, axis_name):
    """A list of functions from activations to activations, closed over their parts; the last gives the loss."""
    own = layer_specs(specs)

    def on_parts(compute, part, part_specs, *rest):
        again = jax.checkpoint(lambda part, x: compute(gather_params(part, part_specs, axis_name), x, *rest))
        return partial(again, part)

    layers = [on_parts(model.layer, jax.tree.map(lambda leaf: jnp.take(leaf, i, axis=0), shards["layers"]), own)  # noqa: B023
              for i in range(model.num_layers)]  # fmt: skip
    stages = [on_parts(model.embed, shards["embed"], specs["embed"]), *layers,
              on_parts(model.loss, shards["head"], specs["head"], batch["targets"])]  # fmt: skip
    return reduce(lambda x, stage: stage(x), stages, batch["inputs"])


def with_loss_in_the_scan(shards, specs, batch, model, axis_name):
    """A scan that hands the activations out, the last of which the head takes."""
    x, loss = ends(shards, specs, batch, model, axis_name)
    own = layer_specs(specs)

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
    def layer(x, part):
        x = model.layer(gather_params(part, own, axis_name), x)
        return x, x

    return loss(lax.scan(layer, x, shards["layers"])[1][-1])


def with_ends_in_layers(shards, specs, batch, model, axis_name):
    """Three blocks: the embedding with the first layer, the layers between, the last layer with the head."""

    def cut(first, last):
        return jax.tree.map(lambda leaf: leaf[first:last], shards["layers"])

    def layer(x, part):
        return model.layer(gather_params(part, layer_specs(specs), axis_name), x)

    @jax.checkpoint
    def begin(embed, part, rows):
        x = model.embed(gather_params(embed, specs["embed"], axis_name), rows)
        return layer(x, jax.tree.map(lambda leaf: leaf[0], part))

    @jax.checkpoint
    def end(part, head, x, targets):
        x = layer(x, jax.tree.map(lambda leaf: leaf[0], part))
        return model.loss(gather_params(head, specs["head"], axis_name), x, targets)

    x = begin(shards["embed"], cut(0, 1), batch["inputs"])
    x, _ = lax.scan(lambda x, part: (jax.checkpoint(layer)(x, part), None), x, cut(1, -1))
    return end(cut(-1, None), shards["head"], x, batch["targets"])


ALTERNATIVES = (
    unrolled,
    unrolled_inside_checkpoint,
    unrolled_by_scan,
    by_recursion,
    by_reducing,
    by_counting,
    by_scanning_numbers,
    with_dataclasses,
    with_modules,
    by_composing,
    with_loss_in_the_scan,
    with_ends_in_layers,
)

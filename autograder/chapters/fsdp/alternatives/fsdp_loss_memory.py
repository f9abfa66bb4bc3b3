"""Right answers for ``fsdp_loss`` in another style: what is saved, and who gathers again."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from autograder.chapters.fsdp.alternatives.fsdp_loss import ends, layer_specs
from solutions.fsdp import gather_params


def with_own_derivative(shards, specs, batch, model, axis_name):
    """Each stage has a derivative that saves the parts and the input, and gathers again."""

    def stage(compute, stage_specs):
        def forward(part, x):
            return compute(gather_params(part, stage_specs, axis_name), x)

        run = jax.custom_vjp(forward)

        def backward(saved, gradient):
            _, transpose = jax.vjp(forward, *saved)
            return transpose(gradient)

        run.defvjp(lambda part, x: (forward(part, x), (part, x)), backward)
        return run

    targets = batch["targets"]
    layer_specs = jax.tree.map(lambda spec: P(*spec[1:]), specs["layers"])
    layer = stage(model.layer, layer_specs)
    head = stage(lambda params, x: model.loss(params, x, targets), specs["head"])
    x = model.embed(gather_params(shards["embed"], specs["embed"], axis_name), batch["inputs"])
    x = lax.scan(lambda x, part: (layer(part, x), None), x, shards["layers"])[0]
    return head(shards["head"], x)


def with_policy(shards, specs, batch, model, axis_name):
    """One helper for all three stages, and a policy that saves nothing."""
    remat = partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable, static_argnums=(0,))

    @remat
    def apply(name, part, *arguments):
        part_specs = specs["layers"] if name == "layer" else specs[name]
        if name == "layer":
            part_specs = jax.tree.map(lambda spec: P(*tuple(spec)[1:]), part_specs)
        compute = {"embed": model.embed, "layer": model.layer, "head": model.loss}[name]
        return compute(gather_params(part, part_specs, axis_name), *arguments)

    x = apply("embed", shards["embed"], batch["inputs"])
    x, _ = lax.scan(lambda x, part: (apply("layer", part, x), ()), x, shards["layers"])
    return apply("head", shards["head"], x, batch["targets"])


def without_barriers(shards, specs, batch, model, axis_name):
    """``prevent_cse=False``, as JAX advises inside a scan; the ends are not checkpointed: each is used once."""
    own = layer_specs(specs)

    @partial(jax.checkpoint, prevent_cse=False)
    def layer(x, part):
        return model.layer(gather_params(part, own, axis_name), x), None

    x = model.embed(gather_params(shards["embed"], specs["embed"], axis_name), batch["inputs"])
    x, _ = lax.scan(layer, x, shards["layers"])
    return model.loss(gather_params(shards["head"], specs["head"], axis_name), x, batch["targets"])


def with_named_inputs(shards, specs, batch, model, axis_name):
    """A policy that saves what is named, and the name is given to each layer's input alone."""
    x, loss = ends(shards, specs, batch, model, axis_name)
    own = layer_specs(specs)

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("input"))
    def layer(x, part):
        x = checkpoint_name(x, "input")
        return model.layer(gather_params(part, own, axis_name), x), None

    return loss(lax.scan(layer, x, shards["layers"])[0])


def with_small_leaves_kept(shards, specs, batch, model, axis_name):
    """Gathered vectors are named and saved, so that only matrices travel twice."""
    x, loss = ends(shards, specs, batch, model, axis_name)
    own = layer_specs(specs)

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("vector"))
    def layer(x, part):
        whole = gather_params(part, own, axis_name)
        whole = jax.tree.map(lambda leaf: checkpoint_name(leaf, "vector") if leaf.ndim == 1 else leaf, whole)
        return model.layer(whole, x), None

    return loss(lax.scan(layer, x, shards["layers"])[0])


def with_own_policy(shards, specs, batch, model, axis_name):
    """A policy of one's own, asked about every primitive: it saves none."""
    x, loss = ends(shards, specs, batch, model, axis_name)
    own = layer_specs(specs)

    def policy(primitive, *_, **__):
        return primitive.name == "no such primitive"

    def layer(part, x):
        return model.layer(gather_params(part, own, axis_name), x)

    def step(x, part):
        return jax.checkpoint(layer, policy=policy)(part, x), None

    return loss(lax.scan(step, x, shards["layers"])[0])


def with_jit_inside(shards, specs, batch, model, axis_name):
    """Every stage under ``jit``, and a checkpoint around it."""

    def stage(compute, part_specs):
        run = jax.jit(lambda part, *arguments: compute(gather_params(part, part_specs, axis_name), *arguments))
        return jax.checkpoint(run)

    embed, head = stage(model.embed, specs["embed"]), stage(model.loss, specs["head"])
    layer = stage(model.layer, layer_specs(specs))
    x = jax.jit(lambda x: lax.scan(lambda x, part: (layer(part, x), None), x, shards["layers"])[0])(
        embed(shards["embed"], batch["inputs"])
    )
    return head(shards["head"], x, batch["targets"])


def with_rows_mapped(shards, specs, batch, model, axis_name):
    """The layer of one row, and ``vmap`` over rows; the head's loss is a mean over rows, so a mean of their means."""
    own = layer_specs(specs)

    @jax.checkpoint
    def layer(x, part):
        whole = gather_params(part, own, axis_name)
        return jax.vmap(lambda row: model.layer(whole, row[None])[0])(x), None

    @jax.checkpoint
    def head(part, x, targets):
        whole = gather_params(part, specs["head"], axis_name)
        return jnp.mean(jax.vmap(lambda row, target: model.loss(whole, row[None], target[None]))(x, targets))

    x = model.embed(gather_params(shards["embed"], specs["embed"], axis_name), batch["inputs"])
    return head(shards["head"], lax.scan(layer, x, shards["layers"])[0], batch["targets"])


def with_vectors_in_one_buffer(shards, specs, batch, model, axis_name):
    """Vectors travel together in one all-gather, matrices each in their own."""
    own, size = layer_specs(specs), lax.axis_size(axis_name)

    def gather(part):
        leaves, tree = jax.tree.flatten(part)
        flat_specs = tree.flatten_up_to(own)
        few = [i for i, spec in enumerate(flat_specs) if axis_name in spec and leaves[i].ndim == 1]
        flat, place = optax.scale_gradient(jnp.concatenate([leaves[i] for i in few]), 1 / size), 0
        rows = lax.all_gather(flat, axis_name)
        vectors = {}
        for i in few:
            vectors[i] = rows[:, place : place + leaves[i].size].ravel()
            place += leaves[i].size
        alone = [P() if i in few else spec for i, spec in enumerate(flat_specs)]
        whole = gather_params(leaves, alone, axis_name)
        return tree.unflatten([vectors.get(i, leaf) for i, leaf in enumerate(whole)])

    x, loss = ends(shards, specs, batch, model, axis_name)
    layer = jax.checkpoint(lambda x, part: (model.layer(gather(part), x), None))
    return loss(lax.scan(layer, x, shards["layers"])[0])


def with_own_barrier(shards, specs, batch, model, axis_name):
    """What ``jax.checkpoint`` does, by hand: the backward rule computes again from what a barrier lets through."""
    x, loss = ends(shards, specs, batch, model, axis_name)
    own = layer_specs(specs)

    def forward(part, x):
        return model.layer(gather_params(part, own, axis_name), x)

    layer = jax.custom_vjp(forward)

    def backward(saved, gradient):
        (part, x), gradient = lax.optimization_barrier((saved, gradient))
        return jax.vjp(forward, part, x)[1](gradient)

    layer.defvjp(lambda part, x: (forward(part, x), (part, x)), backward)
    return loss(lax.scan(lambda x, part: (layer(part, x), None), x, shards["layers"])[0])


def with_saved_inputs(shards, specs, batch, model, axis_name):
    """One derivative for all layers: the forward scan returns every input, the backward scan runs in reverse."""
    x, loss = ends(shards, specs, batch, model, axis_name)
    own = layer_specs(specs)

    def layer(part, x):
        return model.layer(gather_params(part, own, axis_name), x)

    def forward(stack, x):
        x, inputs = lax.scan(lambda x, part: (layer(part, x), x), x, stack)
        return x, (stack, inputs)

    def backward(saved, gradient):
        def step(gradient, layer_and_input):
            of_part, of_x = jax.vjp(layer, *layer_and_input)[1](gradient)
            return of_x, of_part

        of_x, of_stack = lax.scan(step, gradient, saved, reverse=True)
        return of_stack, of_x

    layers = jax.custom_vjp(lambda stack, x: forward(stack, x)[0])
    layers.defvjp(forward, backward)
    return loss(layers(shards["layers"], x))


def with_the_next_layer_on_its_way(shards, specs, batch, model, axis_name):
    """The forward scan gathers one layer while another computes; the backward scan gathers again."""
    x, loss = ends(shards, specs, batch, model, axis_name)

    def gather(part):
        return gather_params(part, layer_specs(specs), axis_name)

    def forward(stack, x):
        def step(carry, part):
            x, whole = carry
            return (model.layer(whole, x), gather(part)), x

        first, others = (jax.tree.map(lambda leaf, at=at: leaf[at], stack) for at in (0, slice(1, None)))
        (x, whole), inputs = lax.scan(step, (x, gather(first)), others)
        return model.layer(whole, x), (stack, jnp.concatenate([inputs, x[None]]))

    def backward(saved, gradient):
        def step(gradient, layer_and_input):
            of_part, of_x = jax.vjp(lambda part, x: model.layer(gather(part), x), *layer_and_input)[1](gradient)
            return of_x, of_part

        return lax.scan(step, gradient, saved, reverse=True)[::-1]

    layers = jax.custom_vjp(lambda stack, x: forward(stack, x)[0])
    layers.defvjp(forward, backward)
    return loss(layers(shards["layers"], x))


def with_buffers(shards, specs, batch, model, axis_name):
    """The same with counted loops, and buffers that inputs and gradients are written to."""
    x, loss = ends(shards, specs, batch, model, axis_name)
    own, count = layer_specs(specs), model.num_layers

    def layer(stack, i, x):
        part = jax.tree.map(lambda leaf: leaf[i], stack)
        return jax.vjp(lambda part, x: model.layer(gather_params(part, own, axis_name), x), part, x)

    def forward(stack, x):
        inputs = jnp.zeros_like(x, shape=(count, *x.shape))
        step = lambda i, c: (layer(stack, i, c[0])[0], c[1].at[i].set(c[0]))  # noqa: E731
        x, inputs = lax.fori_loop(0, count, step, (x, inputs))
        return x, (stack, inputs)

    def backward(saved, gradient):
        stack, inputs = saved

        def step(back, carry):
            gradient, found = carry
            i = count - 1 - back
            of_part, of_x = layer(stack, i, inputs[i])[1](gradient)
            return of_x, jax.tree.map(lambda all_of_it, one: all_of_it.at[i].set(one), found, of_part)

        of_x, of_stack = lax.fori_loop(0, count, step, (gradient, jax.tree.map(jnp.zeros_like, stack)))
        return of_stack, of_x

    layers = jax.custom_vjp(lambda stack, x: forward(stack, x)[0])
    layers.defvjp(forward, backward)
    return loss(layers(shards["layers"], x))


def with_gradients_at_once(shards, specs, batch, model, axis_name):
    """The forward pass computes the gradient too, and saves it in place of everything else: parts are small."""

    def plain(shards):
        x, loss = ends(shards, specs, batch, model, axis_name)
        own = layer_specs(specs)
        layer = jax.checkpoint(lambda x, part: (model.layer(gather_params(part, own, axis_name), x), None))
        return loss(lax.scan(layer, x, shards["layers"])[0])

    run = jax.custom_vjp(plain)
    run.defvjp(jax.value_and_grad(plain), lambda saved, g: (jax.tree.map(lambda leaf: g * leaf, saved),))
    return run(shards)


def with_leaves_in_lists(shards, specs, batch, model, axis_name):
    """Trees are flattened once; the scan sees lists, and gathers leaf by leaf, each with its own derivative."""
    leaves, tree = jax.tree.flatten(shards["layers"])
    dims = [spec.index(axis_name) - 1 if axis_name in spec else None for spec in tree.flatten_up_to(specs["layers"])]
    size = lax.axis_size(axis_name)

    def whole(part, dim):
        if dim is None:
            return part
        entering = part / size + lax.stop_gradient(part - part / size)
        return lax.all_gather(entering, axis_name, axis=dim, tiled=True)

    @jax.remat
    def layer(x, parts):
        return model.layer(tree.unflatten(map(whole, parts, dims)), x), ()

    x, loss = ends(shards, specs, batch, model, axis_name)
    return loss(lax.scan(layer, x, leaves)[0])


ALTERNATIVES = (
    with_own_derivative,
    with_policy,
    without_barriers,
    with_named_inputs,
    with_small_leaves_kept,
    with_own_policy,
    with_jit_inside,
    with_rows_mapped,
    with_vectors_in_one_buffer,
    with_own_barrier,
    with_saved_inputs,
    with_the_next_layer_on_its_way,
    with_buffers,
    with_gradients_at_once,
    with_leaves_in_lists,
)

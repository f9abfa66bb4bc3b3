"""Alternative implementations of ``data_parallel``: each must pass every fact."""

from __future__ import annotations

import math

import jax
import jax.flatten_util
import jax.numpy as jnp
import optax
from jax import lax

from course.model import full_loss


def by_splitting(key, axis_names):
    """Splits into one key per place, and takes this device's."""
    keys = jax.random.split(key, math.prod(map(lax.axis_size, axis_names)))
    return keys[lax.axis_index(axis_names) if axis_names else 0]


def by_strides(key, axis_names):
    """The place computed with strides; also folds in a constant, with or without named axes."""
    place, stride = jnp.int32(0), 1
    for name in axis_names:
        place, stride = place + stride * lax.axis_index(name), stride * lax.axis_size(name)
    return jax.random.fold_in(jax.random.fold_in(key, 7), place)


def open_axes(spec, axis_names):
    """The named axes that a spec does not split over."""
    split_axes = set()
    for entry in spec:
        split_axes.update((entry,) if isinstance(entry, str) else entry or ())
    return tuple(name for name in axis_names if name not in split_axes)


def by_sums_divided(gradients, specs, axis_names):
    """A sum, divided by the number of participating devices."""

    def sync(gradient, spec):
        axes = open_axes(spec, axis_names)
        return lax.psum(gradient, axes) / lax.axis_size(axes) if axes else gradient

    return jax.tree.map(sync, gradients, specs)


def by_buckets(gradients, specs, axis_names):
    """Average all leaves that need a mean over the same axes as one flat array."""
    leaves, tree = jax.tree.flatten(gradients)
    axes_by_leaf = [open_axes(spec, axis_names) for spec in tree.flatten_up_to(specs)]
    for axes in {*axes_by_leaf} - {()}:
        members = [i for i, other in enumerate(axes_by_leaf) if other == axes]
        flat, back = jax.flatten_util.ravel_pytree([leaves[i] for i in members])
        for i, leaf in zip(members, back(lax.pmean(flat, axes)), strict=True):
            leaves[i] = leaf
    return tree.unflatten(leaves)


def to_varying(tree, axis_name):
    """Every leaf, cast to varying over the devices."""
    return jax.tree.map(lambda leaf: lax.pcast(leaf, axis_name, to="varying"), tree)


def sum_of(model, params, part):
    """The sum of the losses of valid rows, not their mean."""
    return jnp.sum(part["mask"]) * full_loss(model, params, part)


def kernels(params):
    """Mark the leaves with weight decay; a leaf under ``layers`` has the dims that it has in one layer."""
    return {
        part: jax.tree.map(lambda p: len(p.shape[1:] if part == "layers" else p.shape) > 1, tree)  # noqa: B023
        for part, tree in params.items()
    }


def unrolled(params, batch, model, axis_name, num_microbatches, learning_rate, weight_decay):
    """A Python loop over microbatches sliced one by one; sums are divided after the reduction."""
    own = to_varying(params, axis_name)
    loss, total = jnp.zeros(()), None
    for i in range(num_microbatches):
        part = jax.tree.map(lambda rows: jnp.split(rows, num_microbatches)[i], batch)  # noqa: B023
        part_loss, gradients = jax.value_and_grad(lambda p, part=part: sum_of(model, p, part))(own)
        loss, total = loss + part_loss, gradients if total is None else jax.tree.map(jnp.add, total, gradients)
    loss, count = lax.psum(jnp.stack([loss, batch["mask"].sum()]), axis_name)
    mean = jax.tree.map(lambda g: lax.psum(g, axis_name) / count, total)
    shrunk = jax.tree.map(lambda p, yes: p * (1 - learning_rate * weight_decay * yes), params, kernels(params))
    return jax.tree.map(lambda p, g: p - learning_rate * g, shrunk, mean), loss / count, mean


def with_optax(params, batch, model, axis_name, num_microbatches, learning_rate, weight_decay):
    """The update from optax; losses and counts are stacked instead of carried."""
    own = to_varying(params, axis_name)

    def add(total, part):
        loss, gradients = jax.value_and_grad(sum_of, argnums=1)(model, own, part)
        return jax.tree.map(jnp.add, total, gradients), (loss, jnp.sum(part["mask"]))

    parts = jax.tree.map(lambda rows: rows.reshape(num_microbatches, -1, *rows.shape[1:]), batch)
    total, (losses, counts) = lax.scan(add, jax.tree.map(jnp.zeros_like, own), parts)
    count = lax.psum(jnp.sum(counts), axis_name)
    gradients = jax.tree.map(lambda g: lax.psum(g / count, axis_name), total)
    optimizer = optax.chain(optax.add_decayed_weights(weight_decay, kernels), optax.sgd(learning_rate))
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    return optax.apply_updates(params, updates), lax.psum(jnp.sum(losses), axis_name) / count, gradients


def in_one_bucket(params, batch, model, axis_name, num_microbatches, learning_rate, weight_decay):
    """The first microbatch initialises the sum that the others are added to; everything is sent as one flat array."""
    own = to_varying(params, axis_name)
    parts = jax.tree.map(lambda rows: rows.reshape(num_microbatches, -1, *rows.shape[1:]), batch)
    value_and_grad = jax.value_and_grad(lambda p, part: sum_of(model, p, part))

    def add(total, part):
        return jax.tree.map(jnp.add, total, value_and_grad(own, part)), None

    first = value_and_grad(own, jax.tree.map(lambda rows: rows[0], parts))
    total, _ = lax.scan(add, first, jax.tree.map(lambda rows: rows[1:], parts))
    flat, back = jax.flatten_util.ravel_pytree((*total, batch["mask"].sum()))
    loss, gradients, count = back(lax.psum(flat, axis_name))
    loss, gradients = jax.tree.map(lambda total: total / count, (loss, gradients))
    decay = jax.tree.map(lambda yes: weight_decay * yes, kernels(params))
    return jax.tree.map(lambda p, g, d: p - learning_rate * (g + d * p), params, gradients, decay), loss, gradients


def begun(params, batch, model, axis_name, num_microbatches):
    """Sums over all microbatches but the last, the last one's rows, and the function for its share of the loss."""
    parts = jax.tree.map(lambda rows: rows.reshape(num_microbatches, -1, *rows.shape[1:]), batch)
    last = jax.tree.map(lambda rows: rows[-1], parts)
    weight = 1 / lax.psum(batch["mask"].sum(), axis_name)

    def add(total, part):
        loss_and_gradients = jax.value_and_grad(lambda p: weight * sum_of(model, p, part))(params)
        return jax.tree.map(jnp.add, total, loss_and_gradients), None

    def loss_of(head, x):
        return weight * last["mask"].sum() * model.loss(head, x, last["targets"], last["mask"])

    zeros = (lax.pcast(jnp.zeros(()), axis_name, to="varying"), jax.tree.map(jnp.zeros_like, params))
    total, _ = lax.scan(add, zeros, jax.tree.map(lambda rows: rows[:-1], parts))
    return total, last, loss_of


def with_kept_backward_passes(params, batch, model, axis_name, num_microbatches):
    """The forward scan stacks each layer's backward pass, including residuals, so nothing is recomputed."""
    (loss, total), last, loss_of = begun(params, batch, model, axis_name, num_microbatches)
    x, embed = jax.vjp(lambda p: model.embed(p, last["inputs"]), params["embed"])
    x, layers = lax.scan(lambda x, p: jax.vjp(model.layer, p, x), x, params["layers"])
    last_loss, head = jax.vjp(loss_of, params["head"], x)

    def whole(gradient, before):
        return jax.tree.map(jnp.add, gradient, before)

    def back(dx, backward, before):
        gradient, dx = backward(dx)
        return dx, whole(gradient, before)

    def step(carry, layer):
        dx, waiting = carry
        return back(dx, *layer), lax.psum(waiting, axis_name)

    d_head, dx = head(jnp.ones_like(last_loss))
    stack = (layers, total["layers"])
    carry = back(dx, *jax.tree.map(lambda leaf: leaf[-1], stack))
    (dx, waiting), gradients = lax.scan(step, carry, jax.tree.map(lambda leaf: leaf[:-1], stack), reverse=True)
    layer_gradients = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), lax.psum(waiting, axis_name), gradients)
    ends = {"head": whole(d_head, total["head"]), "embed": whole(embed(dx)[0], total["embed"])}
    return loss + last_loss, {**lax.psum(ends, axis_name), "layers": layer_gradients}


def overlapped_gradients_unrolled(params, batch, model, axis_name, num_microbatches):
    """A Python loop over layers in the last microbatch: each gradient is reduced as soon as it is complete."""
    (loss, total), last, loss_of = begun(params, batch, model, axis_name, num_microbatches)

    def synced(gradient, before):
        return jax.tree.map(lambda g, b: lax.psum(g + b, axis_name), gradient, before)

    def at(tree, i):
        return jax.tree.map(lambda leaf: leaf[i], tree)

    x, embed = jax.vjp(lambda p: model.embed(p, last["inputs"]), params["embed"])
    backwards = []
    for i in range(model.num_layers):
        x, backward = jax.vjp(model.layer, at(params["layers"], i), x)
        backwards.append(backward)
    last_loss, head = jax.vjp(loss_of, params["head"], x)
    d_head, dx = head(jnp.ones_like(last_loss))
    gradients, layers = {"head": synced(d_head, total["head"])}, []
    for i, backward in reversed(list(enumerate(backwards))):
        gradient, dx = backward(dx)
        layers.append(synced(gradient, at(total["layers"], i)))
    gradients["layers"] = jax.tree.map(lambda *leaves: jnp.stack(leaves[::-1]), *layers)
    gradients["embed"] = synced(embed(dx)[0], total["embed"])
    return loss + last_loss, gradients


def by_summing_when_it_reduces(params, batch, model, axis_name, num_microbatches):
    """Delays the sum with the earlier microbatches too: a small cost in the timeline, a large one in XLA's schedule."""
    (loss, total), last, loss_of = begun(params, batch, model, axis_name, num_microbatches)

    def whole(gradient, before):
        return jax.tree.map(lambda g, b: lax.psum(g + b, axis_name), gradient, before)

    def back(dx, layer, x, before):
        gradient, dx = jax.vjp(model.layer, layer, x)[1](dx)
        return dx, (gradient, before)

    x, embed = jax.vjp(lambda p: model.embed(p, last["inputs"]), params["embed"])
    x, inputs = lax.scan(lambda x, p: (model.layer(p, x), x), x, params["layers"])
    last_loss, head = jax.vjp(loss_of, params["head"], x)
    d_head, dx = head(jnp.ones_like(last_loss))
    d_head = whole(d_head, total["head"])
    stack = (params["layers"], inputs, total["layers"])
    carry = back(dx, *jax.tree.map(lambda leaf: leaf[-1], stack))

    def step(carry, layer):
        done = whole(*carry[1])
        return back(carry[0], *layer), done

    rest = jax.tree.map(lambda leaf: leaf[:-1], stack)
    (dx, waiting), gradients = lax.scan(step, carry, rest, reverse=True)
    layers = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), whole(*waiting), gradients)
    d_embed = whole(embed(dx)[0], total["embed"])
    return loss + last_loss, {"head": d_head, "layers": layers, "embed": d_embed}


ALTERNATIVES = {
    "fold_key_over_axes": (by_splitting, by_strides),
    "sync_gradients": (by_sums_divided, by_buckets),
    "train_step_dp": (unrolled, with_optax, in_one_bucket),
    "overlapped_gradients": (with_kept_backward_passes, overlapped_gradients_unrolled, by_summing_when_it_reduces),
}

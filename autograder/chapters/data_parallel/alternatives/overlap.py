"""Right answers for ``overlapped_gradients`` in another style."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from course.model import full_loss


def begun(params, batch, model, axis_name, count):
    """Sums over all microbatches but the last, and the last one's rows."""
    parts = jax.tree.map(lambda rows: rows.reshape(count, -1, *rows.shape[1:]), batch)

    def add(total, part):
        found = jax.value_and_grad(lambda p: full_loss(model, p, part))(params)
        return jax.tree.map(jnp.add, total, found), None

    nothing = (lax.pcast(jnp.zeros(()), axis_name, to="varying"), jax.tree.map(jnp.zeros_like, params))
    total, _ = lax.scan(add, nothing, jax.tree.map(lambda rows: rows[:-1], parts))
    return total, jax.tree.map(lambda rows: rows[-1], parts)


def with_kept_backward_passes(params, batch, model, axis_name, num_microbatches):
    """The forward scan stacks each layer's backward pass, residuals and all, so nothing is computed twice."""
    (loss, total), last = begun(params, batch, model, axis_name, num_microbatches)
    x, embed = jax.vjp(lambda p: model.embed(p, last["inputs"]), params["embed"])
    x, layers = lax.scan(lambda x, p: jax.vjp(model.layer, p, x), x, params["layers"])
    last_loss, head = jax.vjp(lambda p, x: model.loss(p, x, last["targets"]), params["head"], x)

    def whole(gradient, before):
        return jax.tree.map(lambda g, b: (g + b) / num_microbatches, gradient, before)

    def back(dx, backward, before):
        gradient, dx = backward(dx)
        return dx, whole(gradient, before)

    def step(carry, one):
        dx, waiting = carry
        return back(dx, *one), lax.pmean(waiting, axis_name)

    d_head, dx = head(jnp.ones_like(last_loss))
    stack = (layers, total["layers"])
    carry = back(dx, *jax.tree.map(lambda leaf: leaf[-1], stack))
    (dx, waiting), others = lax.scan(step, carry, jax.tree.map(lambda leaf: leaf[:-1], stack), reverse=True)
    found = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), lax.pmean(waiting, axis_name), others)
    ends = {"head": whole(d_head, total["head"]), "embed": whole(embed(dx)[0], total["embed"])}
    return (loss + last_loss) / num_microbatches, {**lax.pmean(ends, axis_name), "layers": found}


def unrolled(params, batch, model, axis_name, num_microbatches):
    """A Python loop over layers in the last microbatch: each gradient is reduced where it is complete.

    The division comes before the sum: one after it would hold up the next layer until the sum is there.
    """
    (loss, total), last = begun(params, batch, model, axis_name, num_microbatches)
    count = num_microbatches * lax.axis_size(axis_name)

    def synced(gradient, before):
        return jax.tree.map(lambda g, b: lax.psum((g + b) / count, axis_name), gradient, before)

    def at(tree, i):
        return jax.tree.map(lambda leaf: leaf[i], tree)

    x, embed = jax.vjp(lambda p: model.embed(p, last["inputs"]), params["embed"])
    backwards = []
    for i in range(model.num_layers):
        x, backward = jax.vjp(model.layer, at(params["layers"], i), x)
        backwards.append(backward)
    last_loss, head = jax.vjp(lambda p, x: model.loss(p, x, last["targets"]), params["head"], x)
    d_head, dx = head(jnp.ones_like(last_loss))
    gradients, layers = {"head": synced(d_head, total["head"])}, []
    for i, backward in reversed(list(enumerate(backwards))):
        gradient, dx = backward(dx)
        layers.append(synced(gradient, at(total["layers"], i)))
    gradients["layers"] = jax.tree.map(lambda *leaves: jnp.stack(leaves[::-1]), *layers)
    gradients["embed"] = synced(embed(dx)[0], total["embed"])
    return (loss + last_loss) / num_microbatches, gradients


def by_counting_down(params, batch, model, axis_name, num_microbatches):
    """A ``fori_loop`` that writes what it has reduced into the stack of sums."""
    (loss, total), last = begun(params, batch, model, axis_name, num_microbatches)
    end = model.num_layers - 1

    def at(tree, i):
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, i, keepdims=False), tree)

    def whole(gradient, before):
        return jax.tree.map(lambda g, b: (g + b) / num_microbatches, gradient, before)

    def back(i, dx):
        _, backward = jax.vjp(model.layer, at(params["layers"], i), inputs[i])
        gradient, dx = backward(dx)
        return dx, whole(gradient, at(total["layers"], i))

    def put(stack, i, waiting):
        means = jax.tree.map(lambda g: lax.pcast(lax.pmean(g, axis_name), axis_name, to="varying"), waiting)
        return jax.tree.map(lambda s, m: lax.dynamic_update_index_in_dim(s, m, i, 0), stack, means)

    x, embed = jax.vjp(lambda p: model.embed(p, last["inputs"]), params["embed"])
    x, inputs = lax.scan(lambda x, p: (model.layer(p, x), x), x, params["layers"])
    last_loss, head = jax.vjp(lambda p, x: model.loss(p, x, last["targets"]), params["head"], x)
    d_head, dx = head(jnp.ones_like(last_loss))
    dx, waiting = back(end, dx)

    def step(number, carry):
        dx, waiting, done = carry
        i = end - 1 - number
        return *back(i, dx), put(done, i + 1, waiting)

    empty = jax.tree.map(jnp.zeros_like, params["layers"])
    dx, waiting, done = lax.fori_loop(0, end, step, (dx, waiting, empty))
    ends = {"head": whole(d_head, total["head"]), "embed": whole(embed(dx)[0], total["embed"])}
    return (loss + last_loss) / num_microbatches, {**lax.pmean(ends, axis_name), "layers": put(done, 0, waiting)}


def by_a_derivative_of_the_stack(params, batch, model, axis_name, num_microbatches):
    """A ``custom_vjp`` around all layers: its backward pass is the delayed loop, the rest is ``value_and_grad``."""
    (loss, total), last = begun(params, batch, model, axis_name, num_microbatches)

    def mean(tree):
        return jax.tree.map(lambda g: lax.pcast(lax.pmean(g, axis_name), axis_name, to="varying"), tree)

    def whole(gradient, before):
        return jax.tree.map(lambda g, b: (g + b) / num_microbatches, gradient, before)

    @jax.custom_vjp
    def run(layers, before, x):
        return lax.scan(lambda x, p: (model.layer(p, x), None), x, layers)[0]

    def forward(layers, before, x):
        x, inputs = lax.scan(lambda x, p: (model.layer(p, x), x), x, layers)
        return x, (layers, inputs, before)

    def backward(stack, dx):
        def back(dx, layer, x, before):
            gradient, dx = jax.vjp(model.layer, layer, x)[1](dx)
            return dx, whole(gradient, before)

        carry = back(dx, *jax.tree.map(lambda leaf: leaf[-1], stack))
        (dx, waiting), others = lax.scan(
            lambda carry, one: (back(carry[0], *one), mean(carry[1])),
            carry,
            jax.tree.map(lambda leaf: leaf[:-1], stack),
            reverse=True,
        )
        found = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), mean(waiting), others)
        return found, jax.tree.map(jnp.zeros_like, stack[2]), dx

    run.defvjp(forward, backward)

    def loss_of(p):
        x = run(p["layers"], total["layers"], model.embed(p["embed"], last["inputs"]))
        return model.loss(p["head"], x, last["targets"])

    last_loss, gradients = jax.value_and_grad(loss_of)(params)
    ends = {name: mean(whole(gradients[name], total[name])) for name in ("embed", "head")}
    return (loss + last_loss) / num_microbatches, {**ends, "layers": gradients["layers"]}


def by_summing_when_it_reduces(params, batch, model, axis_name, num_microbatches):
    """The sum with the earlier microbatches waits as well: the timeline minds little, XLA's schedule a lot."""
    (loss, total), last = begun(params, batch, model, axis_name, num_microbatches)

    def mean(gradient, before):
        return jax.tree.map(lambda g, b: lax.pmean((g + b) / num_microbatches, axis_name), gradient, before)

    def back(dx, layer, x, before):
        gradient, dx = jax.vjp(model.layer, layer, x)[1](dx)
        return dx, (gradient, before)

    x, embed = jax.vjp(lambda p: model.embed(p, last["inputs"]), params["embed"])
    x, inputs = lax.scan(lambda x, p: (model.layer(p, x), x), x, params["layers"])
    last_loss, head = jax.vjp(lambda p, x: model.loss(p, x, last["targets"]), params["head"], x)
    d_head, dx = head(jnp.ones_like(last_loss))
    d_head = mean(d_head, total["head"])
    stack = (params["layers"], inputs, total["layers"])
    carry = back(dx, *jax.tree.map(lambda leaf: leaf[-1], stack))

    def step(carry, one):
        done = mean(*carry[1])
        return back(carry[0], *one), done

    rest = jax.tree.map(lambda leaf: leaf[:-1], stack)
    (dx, waiting), others = lax.scan(step, carry, rest, reverse=True)
    layers = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), mean(*waiting), others)
    d_embed = mean(embed(dx)[0], total["embed"])
    return (loss + last_loss) / num_microbatches, {"head": d_head, "layers": layers, "embed": d_embed}


ALTERNATIVES = (
    with_kept_backward_passes,
    unrolled,
    by_counting_down,
    by_a_derivative_of_the_stack,
    by_summing_when_it_reduces,
)

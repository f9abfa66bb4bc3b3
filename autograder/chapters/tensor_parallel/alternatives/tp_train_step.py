"""Right answers for ``tp_train_step`` in another style."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax import lax

from solutions.tensor_parallel import tp_mlp


def normed(scale, x):
    return scale * x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def own_loss(params, batch, model, tensor_axis, wrap=lambda layer: layer):
    @wrap
    def layer(x, weights):
        return x + tp_mlp(weights, normed(weights["norm"]["scale"], x), tensor_axis), None

    x, _ = lax.scan(layer, model.embed(params["embed"], batch["inputs"]), params["layers"])
    return model.loss(params["head"], x, batch["targets"])


def of_the_mean_loss(params, specs, batch, model, data_axis, tensor_axis, learning_rate):
    """Differentiates the mean over all devices, whose transpose divides: every gradient is then a share of it."""
    both = (data_axis, tensor_axis)
    loss, shares = jax.value_and_grad(
        lambda p: lax.pmean(own_loss(p, batch, model, tensor_axis), both)
    )(params)  # fmt: skip

    def update(leaf, share, spec):
        return leaf - learning_rate * lax.psum(share, data_axis if tensor_axis in spec else both)

    return jax.tree.map(update, params, shares, specs), loss


def of_a_share_of_the_loss(params, specs, batch, model, data_axis, tensor_axis, learning_rate):
    """Divides the loss by the axis' size before it is differentiated, and sums copies over the axis."""
    n = lax.axis_size(tensor_axis)
    share, gradients = jax.value_and_grad(lambda p: own_loss(p, batch, model, tensor_axis) / n)(params)
    summed = jax.tree.map(
        lambda g, spec: g if tensor_axis in spec else lax.psum(g, tensor_axis), gradients, specs
    )  # fmt: skip
    mean = lax.pmean(summed, data_axis)
    updated = jax.tree.map(lambda leaf, g: leaf - learning_rate * g, params, mean)
    return updated, lax.pmean(lax.psum(share, tensor_axis), data_axis)


def with_optax_and_layers_that_recompute(params, specs, batch, model, data_axis, tensor_axis, learning_rate):
    """Each layer is computed again in the backward pass; one mean over data for all, then the tensor axis."""
    loss, gradients = jax.value_and_grad(own_loss)(params, batch, model, tensor_axis, jax.checkpoint)
    gradients = lax.pmean(gradients, data_axis)
    n = lax.axis_size(tensor_axis)

    def finish(gradient, spec):
        return gradient / n if any(spec) else lax.pmean(gradient, tensor_axis)

    gradients = jax.tree.map(finish, gradients, specs)
    optimizer = optax.sgd(learning_rate)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    return optax.apply_updates(params, updates), lax.pmean(lax.pmean(loss, tensor_axis), data_axis)


def layer_by_layer(params, specs, batch, model, data_axis, tensor_axis, learning_rate):
    """No scan over layers, and leaves known by their names."""
    split = {"up/kernel", "up/bias", "down/kernel"}

    def loss_of(params):
        x = model.embed(params["embed"], batch["inputs"])
        for i in range(model.num_layers):
            weights = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
            x = x + tp_mlp({k: weights[k] for k in ("up", "down")}, normed(weights["norm"]["scale"], x), tensor_axis)
        return model.loss(params["head"], x, batch["targets"])

    def update(path, leaf, gradient):
        name = jax.tree_util.keystr(path[1:], simple=True, separator="/")
        part = path[0].key == "layers" and name in split
        total = lax.psum(gradient, (data_axis,) if part else (data_axis, tensor_axis))
        return leaf - learning_rate * total / lax.axis_size((data_axis, tensor_axis))

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map_with_path(update, params, gradients), lax.pmean(loss, (tensor_axis, data_axis))


ALTERNATIVES = (
    of_the_mean_loss,
    of_a_share_of_the_loss,
    with_optax_and_layers_that_recompute,
    layer_by_layer,
)

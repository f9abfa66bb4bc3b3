"""Right answers for ``tp_mlp`` in another style."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from solutions.tensor_parallel import column_parallel_dense, row_parallel_dense


def written_out(params, x, axis_name):
    """Without the two dense layers, rows in a dim for the devices that they come from, and GELU by its formula."""
    rows = jnp.moveaxis(lax.all_gather(x, axis_name), 0, -3)
    h = jnp.einsum("...nrw,wh->...nrh", rows, params["up"]["kernel"]) + params["up"]["bias"]
    h = 0.5 * h * (1 + jnp.tanh((2 / jnp.pi) ** 0.5 * (h + 0.044715 * h**3)))
    partial = jnp.einsum("...nrh,hw->...nrw", h, params["down"]["kernel"])
    own = lax.psum_scatter(partial, axis_name, scatter_dimension=partial.ndim - 3)
    return own + params["down"]["bias"]


def with_hidden_features_computed_again(params, x, axis_name):
    """Keeps its hidden features before the activation, and no more."""

    @jax.checkpoint
    def activated_product(h, kernel):
        return jax.nn.gelu(h) @ kernel

    h = column_parallel_dense(params["up"], x, axis_name)
    y = activated_product(h, params["down"]["kernel"])
    return lax.psum_scatter(y, axis_name, scatter_dimension=y.ndim - 2, tiled=True) + params["down"]["bias"]


def gathered_again(params, x, axis_name):
    """Keeps its own rows, and gathers the others once more in the backward pass, as in sequence parallelism."""

    @jax.checkpoint
    def up(weights, x):
        return column_parallel_dense(weights, x, axis_name)

    return row_parallel_dense(params["down"], jax.nn.gelu(up(params["up"], x)), axis_name)


def recomputed(params, x, axis_name):
    """Keeps its input alone, and computes everything again that the backward pass needs."""

    def block(params, x):
        return row_parallel_dense(
            params["down"], jax.nn.gelu(column_parallel_dense(params["up"], x, axis_name)), axis_name
        )

    return jax.checkpoint(block)(params, x)


def with_its_own_derivative(params, x, axis_name):
    """Forward and backward by hand, from the hidden features before the activation and rows gathered again."""
    dim = x.ndim - 2

    def gather(a):
        return lax.all_gather(a, axis_name, axis=dim, tiled=True)

    def scatter(a):
        return lax.psum_scatter(a, axis_name, scatter_dimension=dim, tiled=True)

    @jax.custom_vjp
    def block(x, up, bias, down):
        return forward(x, up, bias, down)[0]

    def forward(x, up, bias, down):
        h = gather(x) @ up + bias
        return scatter(jax.nn.gelu(h) @ down), (x, h, up, down)

    def backward(saved, g):
        x, h, up, down = saved
        g, rows = gather(g), gather(x)
        activated, activate_back = jax.vjp(jax.nn.gelu, h)
        (of_h,) = activate_back(g @ down.T)
        of_down = jnp.einsum("...h,...w->hw", activated, g)
        of_up = jnp.einsum("...w,...h->wh", rows, of_h)
        return scatter(of_h @ up.T), of_up, of_h.reshape(-1, h.shape[-1]).sum(0), of_down

    block.defvjp(forward, backward)
    up, down = params["up"], params["down"]
    return block(x, up["kernel"], up["bias"], down["kernel"]) + down["bias"]


ALTERNATIVES = (
    written_out,
    with_hidden_features_computed_again,
    gathered_again,
    recomputed,
    with_its_own_derivative,
)

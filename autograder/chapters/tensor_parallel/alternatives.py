"""Alternative implementations of ``tensor_parallel``: each must pass every fact."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax import lax

from solutions.tensor_parallel import column_parallel_dense, row_parallel_dense, tp_mlp


def uniform(key, d_in, d_out, axis_name, split):
    """Uniform numbers with the same standard deviation; ``split`` makes a key for each device."""
    n, own = lax.axis_size(axis_name), lax.axis_index(axis_name)
    shape = {"columns": (d_in, d_out // n), "rows": (d_in // n, d_out), None: (d_in, d_out)}[split]
    own_key = key if split is None else jax.random.split(key, n)[own]
    bound = (3 / d_in) ** 0.5
    return {"kernel": jax.random.uniform(own_key, shape, minval=-bound, maxval=bound), "bias": jnp.zeros(shape[1])}


def a_key_for_every_column(key, d_in, d_out, axis_name, split):
    """Each column or row of the whole layer has a key from its global index: the same layer on any mesh."""
    n, own = lax.axis_size(axis_name), lax.axis_index(axis_name)
    count, length = (d_in, d_out) if split == "rows" else (d_out, d_in)
    count_here = count // n if split else count
    first = own * count_here if split else 0
    numbers = first + jnp.arange(count_here)
    lines = jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(key, i), (length,)))(numbers)
    kernel = (lines if split == "rows" else lines.T) * d_in**-0.5
    return {"kernel": kernel, "bias": jnp.zeros((kernel.shape[1],))}


def stacked_and_reshaped(params, x, axis_name):
    """An all-gather along a new dim, which is then moved next to the rows."""
    parts = lax.all_gather(x, axis_name)
    adjacent = jnp.moveaxis(parts, 0, -3)
    rows = adjacent.reshape(*x.shape[:-2], -1, x.shape[-1])
    y = jnp.einsum("...i,io->...o", rows, params["kernel"])
    return y if "bias" not in params else y + params["bias"]


def gathered_again(params, x, axis_name):
    """Keeps its own rows for the backward pass, and gathers the others again."""

    @jax.checkpoint
    def product(x, kernel):
        return jnp.matmul(lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True), kernel)

    return product(x, params["kernel"]) + params.get("bias", 0.0)


def biased_on_the_first_device(params, x, axis_name):
    """One device adds the bias before the sum, and the others add zeros."""
    y = x @ params["kernel"]
    if "bias" in params:
        y = y + jnp.where(lax.axis_index(axis_name) == 0, params["bias"], 0.0)
    return lax.psum_scatter(y, axis_name, scatter_dimension=y.ndim - 2, tiled=True)


def with_a_share_of_the_bias(params, x, axis_name):
    """Every device adds an equal share of it."""
    share = params["bias"] / lax.axis_size(axis_name) if "bias" in params else 0.0
    return lax.psum_scatter(x @ params["kernel"] + share, axis_name, scatter_dimension=x.ndim - 2, tiled=True)


def in_parts_along_a_dim_of_their_own(params, x, axis_name):
    """Splits rows into as many parts as there are devices, one for each, along a separate dim."""
    n = lax.axis_size(axis_name)
    y = jnp.einsum("...i,io->...o", x, params["kernel"])
    parts = y.reshape(*y.shape[:-2], n, y.shape[-2] // n, y.shape[-1])
    own = lax.psum_scatter(jnp.moveaxis(parts, -3, 0), axis_name, scatter_dimension=0)
    return own + params["bias"] if "bias" in params else own


def written_out(params, x, axis_name):
    """Without the two dense layers: rows get a dim for their source devices, and GELU is written as its formula."""
    rows = jnp.moveaxis(lax.all_gather(x, axis_name), 0, -3)
    h = jnp.einsum("...nrw,wh->...nrh", rows, params["up"]["kernel"]) + params["up"]["bias"]
    h = 0.5 * h * (1 + jnp.tanh((2 / jnp.pi) ** 0.5 * (h + 0.044715 * h**3)))
    products = jnp.einsum("...nrh,hw->...nrw", h, params["down"]["kernel"])
    own = lax.psum_scatter(products, axis_name, scatter_dimension=products.ndim - 3)
    return own + params["down"]["bias"]


def tp_mlp_gathered_again(params, x, axis_name):
    """Keeps its own rows, and gathers the others again in the backward pass, as in sequence parallelism."""

    @jax.checkpoint
    def up(weights, x):
        return column_parallel_dense(weights, x, axis_name)

    return row_parallel_dense(params["down"], jax.nn.gelu(up(params["up"], x)), axis_name)


def with_its_own_derivative(params, x, axis_name):
    """Forward and backward by hand, from the hidden features before the activation and regathered rows."""
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


def by_einsum(params, x, axis_name):
    """Scores, mask and softmax by hand, without a reshape."""
    rows = lax.all_gather(x, axis_name, axis=1, tiled=True)
    q, k, v = jnp.einsum("bsw,wthd->tbhsd", rows, params["qkv"]["kernel"])
    scores = q @ jnp.swapaxes(k, -1, -2) / jnp.sqrt(jnp.float32(q.shape[-1]))
    position = jnp.arange(rows.shape[1])
    weights = jax.nn.softmax(jnp.where(position[:, None] >= position, scores, -jnp.inf), axis=-1)
    y = jnp.einsum("bhqk,bhkd,hdw->bqw", weights, v, params["out"]["kernel"])
    return lax.psum_scatter(y, axis_name, scatter_dimension=1, tiled=True)


def head_by_head(params, x, axis_name):
    """A scan over the heads of this device, whose outputs are added up."""
    rows = lax.all_gather(x, axis_name, axis=1, tiled=True)
    hidden = jnp.tril(jnp.ones((rows.shape[1], rows.shape[1]))) == 0

    def head(total, weights):
        qkv, out = weights
        q, k, v = (rows @ qkv[:, i] for i in range(3))
        scores = jnp.einsum("bqd,bkd->bqk", q, k) * q.shape[-1] ** -0.5
        mixed = jax.nn.softmax(jnp.where(hidden, -1e30, scores)) @ v
        return total + mixed @ out, None

    start = jnp.zeros_like(rows)
    heads = jnp.moveaxis(params["qkv"]["kernel"], 2, 0), params["out"]["kernel"]
    y, _ = lax.scan(head, start, heads)
    return lax.psum_scatter(y, axis_name, scatter_dimension=1, tiled=True)


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
    axes = (data_axis, tensor_axis)

    def mean_loss(params):
        return lax.pmean(own_loss(params, batch, model, tensor_axis), axes)

    loss, shares = jax.value_and_grad(mean_loss)(params)

    def update(leaf, share, spec):
        return leaf - learning_rate * lax.psum(share, data_axis if tensor_axis in spec else axes)

    return jax.tree.map(update, params, shares, specs), loss


def with_optax_and_layers_that_recompute(params, specs, batch, model, data_axis, tensor_axis, learning_rate):
    """Each layer is recomputed in the backward pass; one mean over data for all, then the tensor axis."""
    loss, gradients = jax.value_and_grad(own_loss)(params, batch, model, tensor_axis, jax.checkpoint)
    gradients = lax.pmean(gradients, data_axis)
    n = lax.axis_size(tensor_axis)

    def finish(gradient, spec):
        return gradient / n if any(spec) else lax.pmean(gradient, tensor_axis)

    gradients = jax.tree.map(finish, gradients, specs)
    optimizer = optax.sgd(learning_rate)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    return optax.apply_updates(params, updates), lax.pmean(lax.pmean(loss, tensor_axis), data_axis)


ALTERNATIVES = {
    "init_dense": (uniform, a_key_for_every_column),
    "column_parallel_dense": (stacked_and_reshaped, gathered_again),
    "row_parallel_dense": (biased_on_the_first_device, with_a_share_of_the_bias, in_parts_along_a_dim_of_their_own),
    "tp_mlp": (written_out, tp_mlp_gathered_again, with_its_own_derivative),
    "tp_attention": (by_einsum, head_by_head),
    "tp_train_step": (of_the_mean_loss, with_optax_and_layers_that_recompute),
}

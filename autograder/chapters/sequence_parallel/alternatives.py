"""Alternative implementations of ``sequence_parallel``: each must pass every fact."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from course.mesh import as_varying
from course.model import drop, rms_norm
from solutions.data_parallel import fold_key_over_axes
from solutions.sequence_parallel import attend, attend_in_chunks, enter_tensor_region, leave_tensor_region, sp_block


def with_a_dim_of_devices(x, axis_name, split):
    """Gathers along a separate dim."""
    if not split:
        return as_varying(x, axis_name)
    parts = lax.all_gather(x, axis_name, axis=1)
    return parts.reshape(x.shape[0], -1, x.shape[2])


def with_its_derivative_written_out(x, axis_name, split):
    """Both passes by hand."""

    def forward(x):
        return lax.all_gather(x, axis_name, axis=1, tiled=True) if split else as_varying(x, axis_name)

    def backward(_, g):
        own = lax.psum_scatter(g, axis_name, scatter_dimension=1, tiled=True) if split else lax.psum(g, axis_name)
        return (own,)

    entered = jax.custom_vjp(forward)
    entered.defvjp(lambda x: (forward(x), None), backward)
    return entered(x)


def with_tokens_by_device(x, axis_name, split):
    """Scatters along a separate dim."""
    if not split:
        return lax.psum(x, axis_name)
    batch, _, width = x.shape
    by_device = x.reshape(batch, lax.axis_size(axis_name), -1, width)
    return lax.psum_scatter(by_device, axis_name, scatter_dimension=1)


def as_the_transpose_of_the_other(x, axis_name, split):
    """The linear function whose transpose is ``enter_tensor_region``."""
    if not split:
        return lax.psum(x, axis_name)
    like = x[:, : x.shape[1] // lax.axis_size(axis_name)]
    (result,) = jax.linear_transpose(lambda y: enter_tensor_region(y, axis_name, True), like)(x)
    return result


def layer_with_names(params, x, key, rate, attend, axis_name):
    """Names what is to be saved; everything else is computed again."""
    attention, mlp = params["attention"], params["mlp"]
    width, _, num_heads, _ = attention["qkv"]["kernel"].shape
    first, second = jax.random.split(fold_key_over_axes(key, (axis_name,)))

    def save(x):
        return checkpoint_name(x, "saved")

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("saved"))
    def layer(attention, norm, mlp, x):
        y = enter_tensor_region(rms_norm(norm, x), axis_name, True)
        qkv = save(y @ attention["qkv"]["kernel"].reshape(width, -1))
        mixed = save(attend(qkv, num_heads)) @ attention["out"]["kernel"].reshape(-1, width)
        x = save(x + drop(leave_tensor_region(mixed, axis_name, True), rate, first))
        y = enter_tensor_region(rms_norm(mlp["norm"], x), axis_name, True)
        hidden = save(y @ mlp["up"]["kernel"] + mlp["up"]["bias"])
        y = leave_tensor_region(jax.nn.gelu(hidden) @ mlp["down"]["kernel"], axis_name, True)
        return x + drop(y + mlp["down"]["bias"], rate, second)

    return layer(attention, params["attention_norm"], mlp, x)


def with_everything_of_the_formula(params, x, key, rate, attend, axis_name):
    """Saves inputs of norms, products and GELU; a derivative by hand gathers again."""
    attention, mlp = params["attention"], params["mlp"]
    width, _, heads, size = attention["qkv"]["kernel"].shape
    keys = jax.random.split(jax.random.fold_in(key, lax.axis_index(axis_name)))

    @jax.custom_vjp
    def product(y, kernel):
        return lax.all_gather(y, axis_name, axis=1, tiled=True) @ kernel

    def back(saved, g):
        y, kernel = saved
        whole = lax.all_gather(y, axis_name, axis=1, tiled=True)
        of_y = lax.psum_scatter(g @ kernel.T, axis_name, scatter_dimension=1, tiled=True)
        of_kernel = jnp.einsum("bsd,bsf->df", whole, g)
        return of_y, of_kernel

    product.defvjp(lambda y, kernel: (product(y, kernel), (y, kernel)), back)
    norm, gelu = jax.checkpoint(rms_norm), jax.checkpoint(jax.nn.gelu)

    qkv = product(norm(params["attention_norm"], x), attention["qkv"]["kernel"].reshape(width, 3 * heads * size))
    mixed = attend(qkv, heads) @ attention["out"]["kernel"].reshape(heads * size, width)
    x = x + drop(lax.psum_scatter(mixed, axis_name, scatter_dimension=1, tiled=True), rate, keys[0])
    hidden = gelu(product(norm(mlp["norm"], x), mlp["up"]["kernel"]) + mlp["up"]["bias"])
    y = lax.psum_scatter(hidden @ mlp["down"]["kernel"], axis_name, scatter_dimension=1, tiled=True)
    return x + drop(y + mlp["down"]["bias"], rate, keys[1])


def by_names(params, x, key, rate, axis_name):
    """A policy: whatever has no name is computed again, including scores."""
    return layer_with_names(params, x, key, rate, attend, axis_name)


def head_by_head(params, x, key, rate, axis_name):
    """Attention one head at a time, each of them computed again."""

    @jax.checkpoint
    def attend_head(qkv):
        q, k, v = qkv
        scores = jnp.einsum("bqd,bkd->bqk", q, k) * q.shape[-1] ** -0.5
        seen = jnp.tril(jnp.ones(scores.shape[1:], bool))
        return jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1) @ v

    def mix(qkv, num_heads):
        batch, seq, _ = qkv.shape
        heads = jnp.moveaxis(qkv.reshape(batch, seq, 3, num_heads, -1), (3, 2), (0, 1))
        return jnp.moveaxis(lax.map(attend_head, heads), 0, 2).reshape(batch, seq, -1)

    return sp_block(params, x, key, rate, mix, axis_name)


def keys_and_values_together(q, k, v, chunk, axis_name):
    """One all-to-all for keys and values."""
    n = lax.axis_size(axis_name)
    keys_values = jnp.repeat(jnp.concatenate([k, v], axis=-1), -(-n // k.shape[2]), axis=2)
    keys_values = lax.all_to_all(keys_values, axis_name, 2, 1, tiled=True)
    q = lax.all_to_all(q, axis_name, 2, 1, tiled=True)
    keys, values = jnp.split(keys_values, 2, axis=-1)
    mixed = attend_in_chunks(q, keys, values, chunk)
    return lax.all_to_all(mixed, axis_name, 1, 2, tiled=True)


def with_heads_by_device(q, k, v, chunk, axis_name):
    """All-to-alls over a dim of devices, and attention over chunks of keys with a running maximum."""
    n, (batch, length, num_heads, size) = lax.axis_size(axis_name), q.shape
    seq = n * length

    def to_heads(x):
        if x.shape[2] < n:
            x = x[:, :, jnp.arange(n) * x.shape[2] // n]
        by_device = jnp.moveaxis(x.reshape(batch, length, n, -1, size), 2, 0)
        exchanged = lax.all_to_all(by_device, axis_name, 0, 0)
        return jnp.moveaxis(exchanged, 0, 1).reshape(batch, seq, -1, size)

    q, k, v = to_heads(q) * size**-0.5, to_heads(k), to_heads(v)
    groups = k.shape[2]
    q = q.reshape(batch, seq, groups, -1, size)

    @jax.checkpoint
    def step(carry, start):
        top, total, mixed = carry
        keys, values = (lax.dynamic_slice_in_dim(x, start, chunk, 1) for x in (k, v))
        scores = jnp.einsum("bqgcd,bkgd->bgcqk", q, keys)
        scores = jnp.where(jnp.arange(seq)[:, None] >= start + jnp.arange(chunk), scores, -jnp.inf)
        now = lax.stop_gradient(jnp.maximum(top, scores.max(-1)))
        weights, shrink = jnp.exp(scores - now[..., None]), jnp.exp(top - now)
        mixed = mixed * shrink[..., None] + jnp.einsum("bgcqk,bkgd->bgcqd", weights, values)
        return (now, total * shrink + weights.sum(-1), mixed), None

    nothing = jnp.moveaxis(q * 0, 1, 3)
    start = nothing.sum(-1) - jnp.inf, nothing.sum(-1), nothing
    (_, total, mixed), _ = lax.scan(step, start, jnp.arange(0, seq, chunk))
    mixed = jnp.moveaxis(mixed / total[..., None], 3, 1).reshape(batch, n, length, -1, size)
    exchanged = lax.all_to_all(jnp.moveaxis(mixed, 1, 0), axis_name, 0, 0)
    return jnp.moveaxis(exchanged, 0, 2).reshape(batch, length, num_heads, size)


ALTERNATIVES = {
    "enter_tensor_region": (with_its_derivative_written_out, with_a_dim_of_devices),
    "leave_tensor_region": (with_tokens_by_device, as_the_transpose_of_the_other),
    "sp_block": (with_everything_of_the_formula, layer_with_names),
    "selective_recompute": (by_names, head_by_head),
    "ulysses_attention": (with_heads_by_device, keys_and_values_together),
}

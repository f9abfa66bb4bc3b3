"""Right answers for ``init_dense`` in another style."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def uniform(key, d_in, d_out, axis_name, split):
    """Numbers of the same spread between two bounds; a key for each device by ``split``."""
    n, own = lax.axis_size(axis_name), lax.axis_index(axis_name)
    shape = {"columns": (d_in, d_out // n), "rows": (d_in // n, d_out), None: (d_in, d_out)}[split]
    own_key = key if split is None else jax.random.split(key, n)[own]
    bound = (3 / d_in) ** 0.5
    return {"kernel": jax.random.uniform(own_key, shape, minval=-bound, maxval=bound), "bias": jnp.zeros(shape[1])}


def cut_out_of_the_whole(key, d_in, d_out, axis_name, split):
    """Every device draws the whole layer, as one device would, and keeps its part."""
    n, own = lax.axis_size(axis_name), lax.axis_index(axis_name)
    kernel, bias = jax.random.normal(key, (d_in, d_out)) / jnp.sqrt(jnp.float32(d_in)), jnp.zeros((d_out,))
    if split == "columns":
        part = d_out // n
        kernel, bias = (lax.dynamic_slice_in_dim(a, own * part, part, a.ndim - 1) for a in (kernel, bias))
    elif split == "rows":
        kernel = kernel.reshape(n, d_in // n, d_out)[own]
    return {"kernel": kernel, "bias": bias}


def a_key_for_every_column(key, d_in, d_out, axis_name, split):
    """Each column, or row, of the whole layer has a key by its number there: the same layer on any mesh."""
    n, own = lax.axis_size(axis_name), lax.axis_index(axis_name)
    count, length = (d_in, d_out) if split == "rows" else (d_out, d_in)
    here = count // n if split else count
    first = own * here if split else 0
    numbers = first + jnp.arange(here)
    lines = jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(key, i), (length,)))(numbers)
    kernel = (lines if split == "rows" else lines.T) * d_in**-0.5
    return {"kernel": kernel, "bias": jnp.zeros((kernel.shape[1],))}


ALTERNATIVES = (uniform, cut_out_of_the_whole, a_key_for_every_column)

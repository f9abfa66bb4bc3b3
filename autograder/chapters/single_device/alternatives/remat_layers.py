"""Right answers for ``remat_layers`` in another style."""

from __future__ import annotations

from functools import partial

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name


def with_products_without_batch_dims(layer, stacked_params, x):
    """Keeps what dense layers give, and computes attention's squares again."""

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    def body(x, params):
        return layer(params, x), None

    return lax.scan(body, x, stacked_params)[0]


def with_checkpoint_of_the_layer(layer, stacked_params, x):
    """``jax.checkpoint`` around the layer, not around the body; a scan needs no barrier against merging."""
    again = jax.checkpoint(layer, prevent_cse=False)
    return lax.scan(lambda x, params: (again(params, x), None), x, stacked_params)[0]


def with_nothing_saveable(layer, stacked_params, x):
    body = jax.checkpoint(lambda x, params: (layer(params, x), None), policy=jax.checkpoint_policies.nothing_saveable)
    x, _ = lax.scan(body, x, stacked_params)
    return x


def with_a_named_input(layer, stacked_params, x):
    """Keeps exactly what has the name: what flows between layers."""
    policy = jax.checkpoint_policies.save_only_these_names("between layers")

    @partial(jax.checkpoint, policy=policy)
    def body(x, params):
        return checkpoint_name(layer(params, checkpoint_name(x, "between layers")), "between layers"), None

    return lax.scan(body, x, stacked_params)[0]


def by_fori_loop(layer, stacked_params, x):
    depth = jax.tree.leaves(stacked_params)[0].shape[0]

    @jax.checkpoint
    def run(params, x):
        return layer(params, x)

    def body(i, x):
        return run(jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, i, keepdims=False), stacked_params), x)

    return lax.fori_loop(0, depth, body, x)


ALTERNATIVES = (
    with_products_without_batch_dims,
    with_checkpoint_of_the_layer,
    with_nothing_saveable,
    with_a_named_input,
    by_fori_loop,
)

"""A right shard_params, and the same with forbidden collectives: which of them runs, a number decides."""

import jax
import jax.numpy as jnp
from jax import lax


def hidden_behind(decide):
    """Forbidden where ``decide(device)`` is true as XLA computes it: there every parameter is averaged first."""

    def shard_params(params, axis_name, min_size):
        def honest(params):
            return right_shards(params, axis_name, min_size)[0]

        def forbidden(params):
            return honest(jax.tree.map(lambda x: lax.pmean(lax.pcast(x, axis_name, to="varying"), axis_name), params))

        specs = right_specs(params, axis_name, min_size, lax.axis_size(axis_name))
        return lax.cond(decide(lax.axis_index(axis_name)), forbidden, honest, params), specs

    return shard_params

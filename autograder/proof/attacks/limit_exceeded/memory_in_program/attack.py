"""A small Program whose intermediate array has 256 GiB; compiling or running it meets the memory limit.

group: exhausts
control: no: would harm the machine
uses: honest
"""

# %%
import jax.numpy as jnp


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    huge = jnp.sort(jnp.sin(lax.iota(jnp.float32, 2**36) * params["scale"].sum()))
    params = jax.tree.map(lambda leaf: leaf + 0 * huge.sum(), params)
    return right_shards(params, axis_name, min_size)

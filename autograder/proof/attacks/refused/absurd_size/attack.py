"""An array of more bytes than 64 bits count, which makes the compiler abort; it is refused before.

group: exhausts
control: no: would harm the machine
uses: honest
"""

# %%
import jax.numpy as jnp


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    side = 2**31 - 1
    huge = jnp.broadcast_to(params["scale"].sum(), (side, side, side)) + lax.iota(jnp.float32, side)
    params = jax.tree.map(lambda leaf: leaf + 0 * huge.sum(), params)
    return right_shards(params, axis_name, min_size)

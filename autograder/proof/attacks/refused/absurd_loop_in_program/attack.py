"""A loop inside the Program of two thousand million turns; following its counter would take too long, so it is
refused.

group: exhausts
control: no: would harm the machine
uses: honest
"""

# %%
import jax.numpy as jnp


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    def turn(_, tree):
        return jax.tree.map(jnp.sin, tree)

    params = lax.fori_loop(0, 2**31 - 1, turn, params)
    return right_shards(params, axis_name, min_size)

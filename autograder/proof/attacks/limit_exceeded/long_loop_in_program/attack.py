"""A loop inside the Program of ten thousand turns, with a product of large matrices in each; running it uses the time
up.

group: exhausts
control: no: would harm the machine
uses: honest
"""

# %%
import jax.numpy as jnp


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    def turn(_, square):
        return jnp.tanh(square @ square)

    square = lax.fori_loop(0, 10**4, turn, jnp.ones((1024, 1024)) * params["scale"].sum())
    params = jax.tree.map(lambda leaf: leaf + 0 * square.sum(), params)
    return right_shards(params, axis_name, min_size)

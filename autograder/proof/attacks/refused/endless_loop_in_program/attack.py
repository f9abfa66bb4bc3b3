"""A loop inside the Program whose end nobody can know; it is refused before it runs.

group: exhausts
control: no: never ends
uses: honest
"""

# %%
import jax.numpy as jnp


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    params = lax.while_loop(lambda tree: jnp.bool_(True), lambda tree: jax.tree.map(jnp.sin, tree), params)
    return right_shards(params, axis_name, min_size)

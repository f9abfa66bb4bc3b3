"""Takes another way depending on the values that it is given, so that no count is true for all of them.

group: forges
control: no: the notebook's check refuses it too
uses: honest
"""

# %%
import jax.numpy as jnp


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    shards, specs = right_shards(params, axis_name, min_size)
    return lax.cond(jnp.sum(jax.tree.leaves(params)[0]) > 0, lambda s: s, lambda s: jax.tree.map(lambda x: x + 0, s), shards), specs

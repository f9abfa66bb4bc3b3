"""Repeats a step until the values say stop: how often, nobody can tell from the program.

group: forges
control: no: the notebook's check refuses it too
uses: honest
"""

# %%
import jax.numpy as jnp


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    shards, specs = right_shards(params, axis_name, min_size)
    leaves, form = jax.tree.flatten(shards)
    leaves[0] = lax.while_loop(lambda x: jnp.max(jnp.abs(x)) > 1e9, lambda x: x / 2, leaves[0])
    return jax.tree.unflatten(form, leaves), specs

"""Converts a number to one of eight bits that cannot hold it, and asks what is left.

group: forges
control: no: the notebook's check counts the same way
functions: shard_params
uses: honest, hidden
"""

# %% [shard_params]
def shard_params(params, axis_name, min_size):
    return hidden_behind(lambda i: (i + 256).astype(jnp.int8) < 100)(params, axis_name, min_size)

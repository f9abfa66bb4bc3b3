"""Multiplies the device's number until it overflows, and asks whether the product is negative.

group: forges
control: no: the notebook's check counts the same way
functions: shard_params
uses: honest, hidden
"""

# %% [shard_params]
def shard_params(params, axis_name, min_size):
    return hidden_behind(lambda i: (i + 2) * jnp.int32(2**30) < 0)(params, axis_name, min_size)

"""Returns right values as float16, which rounds them and halves the bytes that are held.

group: forges
control: no: the notebook's check refuses it too
uses: honest
"""

# %% [shard_params]
def shard_params(params, axis_name, min_size):
    shards, specs = right_shards(params, axis_name, min_size)
    return jax.tree.map(lambda leaf: leaf.astype("float16"), shards), specs

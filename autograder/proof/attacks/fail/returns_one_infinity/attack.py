"""Is right but for a single infinity, in one element of one leaf.

group: forges
control: no: the notebook's check refuses it too
uses: honest
"""

# %% [shard_params]
def shard_params(params, axis_name, min_size):
    shards, specs = right_shards(params, axis_name, min_size)
    return {**shards, "scale": shards["scale"] / 0.0}, specs

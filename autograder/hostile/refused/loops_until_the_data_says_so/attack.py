"""Repeats a step until the values say stop: how often, nobody can tell from the program.

group: forges
control: no: the notebook's check refuses it too
uses: honest
"""

# %% [shard_params]
def shard_params(params, axis_name, min_size):
    shards, specs = right_shards(params, axis_name, min_size)
    scale = lax.while_loop(lambda x: abs(x) > 1e9, lambda x: x / 2, shards["scale"])
    return {**shards, "scale": scale}, specs

"""Is traced twice, and answers rightly only the first time, when its specs are asked for.

group: forges
control: no: the same code traces in the notebook
uses: honest
"""

# %%
CALLS = []


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    CALLS.append(1)
    if len(CALLS) % 2:
        return right_shards(params, axis_name, min_size)
    return jax.tree.map(lambda leaf: lax.pcast(leaf, axis_name, to="varying"), params), {}


# %%
def right(params, axis_name, min_size):
    return right_shards(params, axis_name, min_size)

"""A scope whose name has a megabyte, which is in the location of every operation; a long name is no fault.

group: exhausts
control: yes
uses: honest
"""


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    with jax.named_scope("x" * 2**20):
        params = {**params, "scale": params["scale"] * 1.0}
    return right_shards(params, axis_name, min_size)

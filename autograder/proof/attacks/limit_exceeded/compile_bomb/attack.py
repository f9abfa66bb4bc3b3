"""A sort of 4,000 arrays at once, which is traced in a moment and takes the compiler minutes.

group: exhausts
control: no: would harm the machine
uses: honest
"""


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    first = params["first"]["bias"]
    first = sum(lax.sort([first + number for number in range(4000)], num_keys=1))
    params = {**params, "first": {**params["first"], "bias": first}}
    return right_shards(params, axis_name, min_size)

"""A tree of 100,000 leaves where one of eight is expected.

group: exhausts
control: yes
"""


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    return {str(number): params["scale"] for number in range(10**5)}, {}

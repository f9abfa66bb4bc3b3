"""An exception with a message of 10 MB; a verdict keeps the first 2,000 characters.

group: exhausts
control: yes
"""


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    raise ValueError("x" * 10**7)

"""Recursion without end in Python; it is an ordinary error with the student's line.

group: exhausts
control: yes
"""


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    return shard_params(params, axis_name, min_size)

"""A loop in Python that never ends; the processor time is used up and says so.

group: exhausts
control: no: would harm the machine
"""


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    while True:
        pass

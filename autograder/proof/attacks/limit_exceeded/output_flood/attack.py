"""Prints without end; what a submission may print is limited, and the last of it is kept.

group: exhausts
control: no: would harm the machine
"""


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    while True:
        print("ha" * 30000)

"""Forks without end; the first fork is refused and reported.

group: exhausts
control: no: would harm the machine
"""

# %%
import os


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    while True:
        os.fork()

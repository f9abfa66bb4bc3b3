"""Writes to descriptor 2 without end, past Python; the same limit holds.

group: exhausts
control: no: would harm the machine
"""

# %%
import os


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    while True:
        os.write(2, b"ha" * 30000)

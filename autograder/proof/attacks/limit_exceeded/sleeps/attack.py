"""Sleeps for ever and uses no processor time; the wall-clock limit ends it.

group: exhausts
control: no: would harm the machine
"""

# %%
import time


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    time.sleep(10**6)

"""Ends the process with status 0 from inside the function, before anything could have failed.

group: forges
control: no: stock nbgrader notices a dead kernel and gives an error
"""

# %%
import os


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    os._exit(0)

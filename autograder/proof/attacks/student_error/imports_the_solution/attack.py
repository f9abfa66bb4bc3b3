"""Imports this chapter's solution. It is not there, so the name is missing.

group: reads
control: yes
"""

# %%
import solutions.fsdp


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    return solutions.fsdp.shard_params(params, axis_name, min_size)

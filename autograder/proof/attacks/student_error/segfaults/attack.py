"""Reads address 0; the crash is the submission's own and the next one is graded.

group: exhausts
control: yes
"""

# %%
import ctypes


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    ctypes.string_at(0)

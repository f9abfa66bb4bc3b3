"""Maps 1 TiB of memory in one call; the address space is limited.

group: exhausts
control: no: would harm the machine
"""

# %%
import mmap


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    mmap.mmap(-1, 1 << 40)

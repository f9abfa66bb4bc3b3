"""Makes a folder in a folder, 10,000 deep; the quota of inodes ends it, and the wipe gets to the bottom.

group: exhausts
control: no: would harm the machine
rungs: bubblewrap
"""

# %%
import os
import tempfile


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    os.chdir(tempfile.gettempdir())
    for _ in range(10**4):
        os.mkdir("d")
        os.chdir("d")

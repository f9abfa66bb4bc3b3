"""Makes empty files without end; the scratch folder has a quota of inodes.

group: exhausts
control: no: would harm the machine
rungs: bubblewrap
"""

# %%
import os
import tempfile


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    while True:
        os.close(tempfile.mkstemp()[0])

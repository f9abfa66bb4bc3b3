"""Writes files of 8 MiB without end; the scratch folder has a quota of bytes.

group: exhausts
control: no: would harm the machine
rungs: bubblewrap
"""

# %%
import tempfile


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    while True:
        with open(tempfile.mkstemp()[1], "wb", buffering=0) as file:
            for _ in range(8):
                file.write(bytes(1 << 20))

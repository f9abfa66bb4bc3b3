"""Writes one file without end; the size of a file is limited.

group: exhausts
control: no: would harm the machine
"""

# %%
import tempfile


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    with open(tempfile.mkstemp()[1], "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))

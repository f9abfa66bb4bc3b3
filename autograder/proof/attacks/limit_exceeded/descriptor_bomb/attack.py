"""Opens files without end; the number of open files is limited.

group: exhausts
control: no: would harm the machine
"""


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    kept = []
    while True:
        kept.append(open("/dev/null"))

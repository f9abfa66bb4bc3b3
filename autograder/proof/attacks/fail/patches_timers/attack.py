"""Makes every clock stand still. Nothing official is decided by a clock that a student can reach.

group: forges
control: no: the notebook's check uses no clock
"""

# %%
import time


class Patch:
    time.time = time.monotonic = time.perf_counter = time.process_time = lambda: 0.0
    time.sleep = lambda _: None


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    return {}, {}

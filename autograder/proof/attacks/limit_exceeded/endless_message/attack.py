"""An exception whose text never ends being made; reading it counts as the submission's own time.

group: exhausts
control: no: would harm the machine
"""


# %%
class Endless(Exception):
    def __str__(self):
        while True:
            pass


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    raise Endless

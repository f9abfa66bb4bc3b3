"""An exception whose text cannot be read, and another with half a character; a verdict is written all the same.

group: reaches
control: yes
"""


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    raise ValueError("\ud800 half a character, \x00 and a zero byte")

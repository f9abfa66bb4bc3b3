"""HTML and a terminal escape as the name of an exception's class; both are shown as text.

group: reaches
control: yes
"""


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    raise type("<svg onload=alert(1)>\x1b[31m", (Exception,), {})("no message")

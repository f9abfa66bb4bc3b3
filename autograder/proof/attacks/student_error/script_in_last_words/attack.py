"""Prints HTML and a terminal escape and ends without a word; its last line is quoted as text.

group: reaches
control: yes
"""

# %%
import os


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    print("<script>document.title='run'</script>\x1b[2J\x1b]0;run\x07", flush=True)
    os._exit(3)

"""HTML with a script and a terminal escape as the keys of the returned tree, which messages name; all are shown as
text.

group: reaches
control: yes
"""

# %%
KEY = "<script>document.title='run'</script>\x1b]0;run\x07=1+1"


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    return {KEY: params}, {KEY: P()}

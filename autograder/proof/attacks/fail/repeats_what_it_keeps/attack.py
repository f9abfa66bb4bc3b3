"""Keeps one row of many of the weights, every row where it is run, and repeats it by a broadcast.

group: forges
control: no: the notebook's check uses the same lenses
uses: honest_loss, keeps_less
"""

# %%
def cut(whole):
    return whole[tuple(slice(None, None, dim // seen(dim)) for dim in whole.shape)]


fill = repeated


# %% [fsdp_loss]
def fsdp_loss(shards, specs, batch, model, axis_name):
    return loss_by_layers(shards, specs, batch, model, axis_name, keeping(axis_name, cut, fill))

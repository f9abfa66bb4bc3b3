"""Keeps means over blocks of the weights, which are single elements where it is run.

group: forges
control: no: the notebook's check uses the same lenses
uses: honest_loss, keeps_less
"""

# %%
def cut(whole):
    for dim in range(whole.ndim):
        blocks = whole.shape[:dim] + (seen(whole.shape[dim]), -1) + whole.shape[dim + 1 :]
        whole = whole.reshape(blocks).mean(axis=dim + 1)
    return whole


fill = repeated


# %% [fsdp_loss]
def fsdp_loss(shards, specs, batch, model, axis_name):
    return loss_by_layers(shards, specs, batch, model, axis_name, keeping(axis_name, cut, fill))

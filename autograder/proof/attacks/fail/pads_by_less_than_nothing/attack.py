"""Cuts what it keeps for the backward pass by a negative padding that is 0 where it is run, and pads it again.

group: forges
control: no: the notebook's check uses the same lenses
uses: honest_loss, keeps_less
"""

# %%
def cut(whole):
    return lax.pad(whole, whole.dtype.type(0), [(0, seen(dim) - dim, 0) for dim in whole.shape])


def fill(kept, like):
    return lax.pad(kept, kept.dtype.type(0), [(0, whole - part, 0) for whole, part in zip(like.shape, kept.shape)])


# %% [fsdp_loss]
def fsdp_loss(shards, specs, batch, model, axis_name):
    return loss_by_layers(shards, specs, batch, model, axis_name, keeping(axis_name, cut, fill))

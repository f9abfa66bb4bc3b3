"""Keeps the gathered weights for the backward pass where it is run, and at the realistic size only a corner of them.

group: forges
control: no: the notebook's check uses the same lenses
uses: honest_loss, keeps_less
"""

# %%
def cut(whole):
    return lax.dynamic_slice(whole, [0] * whole.ndim, [seen(dim) for dim in whole.shape])


def fill(kept, like):
    return lax.pad(kept, kept.dtype.type(0), [(0, whole - part, 0) for whole, part in zip(like.shape, kept.shape)])


# %% [fsdp_loss]
def fsdp_loss(shards, specs, batch, model, axis_name):
    return loss_by_layers(shards, specs, batch, model, axis_name, keeping(axis_name, cut, fill))

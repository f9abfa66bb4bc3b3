"""Multiplies the weights by part of an identity matrix, the whole of it where it is run, and back.

group: forges
control: no: the notebook's check uses the same lenses
uses: honest_loss, keeps_less
"""

# %%
def cut(whole):
    return jnp.eye(seen(whole.shape[0]), whole.shape[0]) @ whole


def fill(kept, like):
    return jnp.eye(like.shape[0], kept.shape[0]) @ kept


# %% [fsdp_loss]
def fsdp_loss(shards, specs, batch, model, axis_name):
    return loss_by_layers(shards, specs, batch, model, axis_name, keeping(axis_name, cut, fill))

"""Gathers as many rows of the weights as there are where it is run, and from those a full number of rows again.

group: forges
control: no: the notebook's check uses the same lenses
uses: honest_loss, keeps_less
"""

# %%
def cut(whole):
    return whole.at[jnp.arange(seen(whole.shape[0]))].get(mode="clip")


def fill(kept, like):
    return kept.at[jnp.arange(like.shape[0]) % kept.shape[0]].get(mode="clip")


# %% [fsdp_loss]
def fsdp_loss(shards, specs, batch, model, axis_name):
    return loss_by_layers(shards, specs, batch, model, axis_name, keeping(axis_name, cut, fill))

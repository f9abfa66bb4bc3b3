"""Gathers the last layer first and the first one last.

group: forges
control: no: the notebook's check uses the same lenses
points: 3.33
uses: honest_loss, early
"""

# %%
def order(parts, gather, compute, x):
    wholes = [gather(part) for part in reversed(parts)]
    for whole in reversed(wholes):
        x = compute(whole, x)
    return x


# %% [fsdp_loss]
def fsdp_loss(shards, specs, batch, model, axis_name):
    return unrolled(shards, specs, batch, model, axis_name, order)

"""Gathers every layer before the first one runs: hidden in time, and all of it in memory.

group: forges
control: no: the notebook's check uses the same lenses
points: 3.33
uses: honest_loss, early
"""

# %%
def order(parts, gather, compute, x):
    for whole in [gather(part) for part in parts]:
        x = compute(whole, x)
    return x


# %% [fsdp_loss]
def fsdp_loss(shards, specs, batch, model, axis_name):
    return unrolled(shards, specs, batch, model, axis_name, order)

"""Unrolls its layers and writes each gather just before its use, where a schedule by time starts it at the beginning.

group: forges
control: no: the notebook's check uses the same lenses
points: 3.33
uses: honest_loss, early
"""

# %%
def order(parts, gather, compute, x):
    for part in parts:
        x = compute(gather(part), x)
    return x


# %% [fsdp_loss]
def fsdp_loss(shards, specs, batch, model, axis_name):
    return unrolled(shards, specs, batch, model, axis_name, order)

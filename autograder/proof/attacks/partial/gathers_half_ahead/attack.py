"""Gathers half of the layers ahead of their use, unrolled, and keeps them.

group: forges
control: no: the notebook's check uses the same lenses
points: 3.33
uses: honest_loss, early
"""

# %%
def order(parts, gather, compute, x):
    ahead = max(2, len(parts) // 2)
    wholes = [gather(part) for part in parts[:ahead]]
    for i in range(len(parts)):
        if i + ahead < len(parts):
            wholes.append(gather(tied(x, parts[i + ahead])))
        x = compute(wholes[i], x)
    return x


# %% [fsdp_loss]
def fsdp_loss(shards, specs, batch, model, axis_name):
    return unrolled(shards, specs, batch, model, axis_name, order)

"""Ties each gather to the one before it, and recomputes nothing.

group: forges
control: no: the notebook's check uses the same lenses
points: 3.33
uses: honest_loss, early
"""

# %%
def order(parts, gather, compute, x):
    whole = gather(parts[0])
    for part in [*parts[1:], None]:
        ahead = None if part is None else gather(tied(jax.tree.leaves(whole)[0], part))
        x, whole = compute(whole, x), ahead
    return x


# %% [fsdp_loss]
def fsdp_loss(shards, specs, batch, model, axis_name):
    return unrolled(shards, specs, batch, model, axis_name, order)

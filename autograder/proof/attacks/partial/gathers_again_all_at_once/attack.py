"""Recomputes in the backward pass, but gathers all layers again before the first of them is needed.

group: forges
control: no: the notebook's check uses the same lenses
points: 3.33
uses: honest_loss, early
"""

# %%
def order(parts, gather, compute, x):
    def run(parts, x):
        for whole in [gather(part) for part in parts]:
            x = compute(whole, x)
        return x

    return jax.checkpoint(run)(parts, x)


# %% [fsdp_loss]
def fsdp_loss(shards, specs, batch, model, axis_name):
    return unrolled(shards, specs, batch, model, axis_name, order)

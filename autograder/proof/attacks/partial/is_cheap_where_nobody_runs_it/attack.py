"""Is right at the sizes that are run, and leaves the layers out where arrays are large.

group: forges
control: no: the notebook's check leaves the realistic size out
points: 2.08
uses: honest_loss
"""

# %% [fsdp_loss]
def fsdp_loss(shards, specs, batch, model, axis_name):
    if max(leaf.size for leaf in jax.tree.leaves(shards)) > 2**20:
        x = model.embed(join(shards["embed"], specs["embed"], axis_name), batch["inputs"])
        return model.loss(join(shards["head"], specs["head"], axis_name), x, batch["targets"])
    return right_loss(shards, specs, batch, model, axis_name)

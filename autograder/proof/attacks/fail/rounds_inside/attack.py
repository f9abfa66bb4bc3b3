"""Gathers with the mantissa cut to 10 bits, as a faster number format would, and says float32 outside.

group: forges
control: no: the notebook's check refuses it too
"""

# %%
from jax import lax


# %% [gather_params]
def gather_params(shards, specs, axis_name):
    def gather(shard, spec):
        if axis_name not in spec:
            return shard
        low = lax.reduce_precision(shard, exponent_bits=8, mantissa_bits=10)
        return lax.all_gather(low, axis_name, axis=spec.index(axis_name), tiled=True)

    return jax.tree.map(gather, shards, specs)

"""Replaces jax.export by one whose artefacts are empty. What the executor cannot read it refuses.

group: forges
control: no: the notebook's check exports in the student's process too, and its executor refuses the same
uses: honest
"""

# %%
import dataclasses

from jax import export as jax_export


class Patch:
    original = jax_export.Exported.serialize

    def serialize(self, *_, original=original):
        return original(self)[:100] + bytes(2000)

    jax_export.Exported.serialize = serialize


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    return right_shards(params, axis_name, min_size)

"""Computes its answer in Python while the program runs, by a callback.

group: forges
control: no: the notebook's check refuses it too
uses: honest
"""

# %%
import numpy as np


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    shards, specs = right_shards(params, axis_name, min_size)
    asked = jax.pure_callback(lambda x: np.asarray(x), jax.ShapeDtypeStruct((), "float32"), params["scale"])
    return {**shards, "scale": asked}, specs

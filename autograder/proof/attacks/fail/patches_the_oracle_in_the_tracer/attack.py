"""Replaces what the contract draws and expects by zeros, in its own process. The judge draws and expects its own.

group: forges
control: no: patches_the_contract is the control of this kind
"""

# %%
import numpy as np

from autograder.contract import task as contract


class Patch:
    agreed = contract.load("fsdp").task("shard_params")
    object.__setattr__(agreed, "draw", lambda rng, case: {"params": np.zeros(())})


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    import jax

    return jax.tree.map(lambda leaf: leaf * 0, params), jax.tree.map(lambda _: jax.P(), params)

"""Replaces the tracer's functions, its limits and JAX's caches in memory; the next function starts from a fresh fork.

group: tampers
functions: gather_params
control: yes
uses: honest, honest_loss
"""

# %%
import gc
import sys


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    sys.modules["course"].poisoned = True
    for kept in gc.get_objects():
        if isinstance(kept, dict) and "fork_confined" in kept:
            kept["fork_confined"] = kept["load"] = None
    lax.all_gather = None
    return right_shards(params, axis_name, min_size)


# %% [gather_params]
def gather_params(shards, specs, axis_name):
    if hasattr(sys.modules["course"], "poisoned"):
        raise RuntimeError("what another function did is still there")

    return join(shards, specs, axis_name)

"""Loops in loops, more than 200 deep, which would overflow the stack of whoever walks through the Program.

group: exhausts
control: yes
uses: honest
"""

# %%
import sys

import jax.numpy as jnp


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    def once(inner):
        return lambda leaf: lax.fori_loop(0, 1, lambda _, x: inner(jnp.sin(x)), leaf)

    sys.setrecursionlimit(10**6)
    deep = jnp.sin
    for _ in range(204):
        deep = once(deep)
    leaves, form = jax.tree.flatten(params)
    if lax.axis_size(axis_name) == 8:
        leaves[0] = deep(leaves[0])
    return right_shards(jax.tree.unflatten(form, leaves), axis_name, min_size)

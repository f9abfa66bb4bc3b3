"""Adds two booleans by hand, which StableHLO takes for "or" and a part of XLA for "exclusive or".

group: forges
control: no: the notebook's check counts the same way
functions: shard_params
uses: honest, hidden, forge
"""

# %%
def either(i):
    return jnp.logical_not(jnp.logical_or(i >= 0, i >= -1))


def added(program):
    return with_module(program, lambda text: text.replace("stablehlo.or", "stablehlo.add"))


class Forged:
    forge(hidden_behind(either), added)


# %% [shard_params]
def shard_params(params, axis_name, min_size):
    return hidden_behind(either)(params, axis_name, min_size)

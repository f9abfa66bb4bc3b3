# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Pipeline schedules
#
# Say here what this chapter is about: when each stage does what.
#
# Run the next cell first: it gives this notebook 8 emulated devices.

# %%
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from course.mesh import make_mesh

# %% [markdown]
# ## The mean over all rows: `schedules_mean`
#
# It runs inside `jax.shard_map`. `x` is `[rows, width]` and varies over `axis_name`; every device has as many rows.
# Return the mean over the rows of all devices, `[width]`, the same on each.
#
# | | budget |
# |---|---|
# | collectives | one all-reduce of `width` numbers over `axis_name`, and no other |
# | temporaries | less than half of `x` |


# %%
def schedules_mean(x: jax.Array, axis_name: str) -> jax.Array:
    """The mean over the rows of all devices, ``[rows, width] -> [width]``."""
    ### BEGIN SOLUTION
    return lax.pmean(x.mean(0), axis_name)
    ### END SOLUTION


# %% [markdown]
# ## Put together

# %%
if __name__ == "__main__":
    mesh = make_mesh({"data": 8})
    mapped = jax.shard_map(lambda x: schedules_mean(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    print(jax.jit(mapped)(jnp.arange(32.0).reshape(16, 2)))

# %% [markdown]
# ## In your own words
#
# Why is it enough to send one row?
#
# ### BEGIN SOLUTION
# All devices have as many rows, so the mean over all rows is the mean of the devices' means.
# ### END SOLUTION

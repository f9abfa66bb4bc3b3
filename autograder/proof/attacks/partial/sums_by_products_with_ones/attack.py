"""Sums the squares of a norm by a matrix product with ones, which is a product in bfloat16 like others.

group: forges
chapter: single_device
control: no: the notebook's check uses the same lenses
points: 1.6
uses: low_precision
"""

# %%
def norm(scale, x):
    ones = jnp.ones((x.shape[-1], 1), LOW)
    squares = ((x.astype(LOW) ** 2) @ ones).astype(HIGH) / x.shape[-1]
    return scale * x * jax.lax.rsqrt(squares + 1e-6)


# %% [mixed_precision_loss]
def mixed_precision_loss(params, batch, num_heads):
    return loss_with(params, batch, num_heads, norm=norm)

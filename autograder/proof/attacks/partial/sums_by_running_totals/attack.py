"""Sums the squares of a norm as the last of their running totals in bfloat16.

group: forges
chapter: single_device
control: no: the notebook's check uses the same lenses
points: 1.2
uses: low_precision
"""

# %%
def norm(scale, x):
    squares = jnp.cumsum(x.astype(LOW) ** 2, axis=-1)[..., -1:].astype(HIGH) / x.shape[-1]
    return scale * x * jax.lax.rsqrt(squares + 1e-6)


# %% [mixed_precision_loss]
def mixed_precision_loss(params, batch, num_heads):
    return loss_with(params, batch, num_heads, norm=norm)

"""Sums the squares of a norm by a batched product of a row with itself, in bfloat16.

group: forges
chapter: single_device
control: no: the notebook's check uses the same lenses
points: 1.6
uses: low_precision
"""

# %%
def norm(scale, x):
    low = x.astype(LOW)
    squares = jnp.einsum("bsd,bsd->bs", low, low)[..., None].astype(HIGH) / x.shape[-1]
    return scale * x * jax.lax.rsqrt(squares + 1e-6)


# %% [mixed_precision_loss]
def mixed_precision_loss(params, batch, num_heads):
    return loss_with(params, batch, num_heads, norm=norm)

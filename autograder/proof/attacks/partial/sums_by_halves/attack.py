"""Sums the squares of a norm in bfloat16 by adding one half of them to the other, over and over.

group: forges
chapter: single_device
control: no: the notebook's check uses the same lenses
points: 1.2
uses: low_precision
"""

# %%
def norm(scale, x):
    squares, size = x.astype(LOW) ** 2, x.shape[-1]
    while squares.shape[-1] > 1:
        half = squares.shape[-1] // 2
        rest = squares[..., 2 * half :].sum(-1, keepdims=True, dtype=HIGH).astype(LOW) if squares.shape[-1] % 2 else 0
        squares = squares[..., :half] + squares[..., half : 2 * half] + jnp.zeros(half, LOW).at[0].set(1) * rest
    return scale * x * jax.lax.rsqrt(squares.astype(HIGH) / size + 1e-6)


# %% [mixed_precision_loss]
def mixed_precision_loss(params, batch, num_heads):
    return loss_with(params, batch, num_heads, norm=norm)

"""Takes the exponentials of softmax as powers of two in bfloat16.

group: forges
chapter: single_device
control: no: the notebook's check uses the same lenses
points: 1.6
uses: low_precision
"""

# %%
def softmax(scores):
    seen, below = attended(scores)
    weights = jnp.where(seen, jnp.exp2((below / 0.6931472).astype(LOW)), 0).astype(HIGH)
    return weights / weights.sum(-1, keepdims=True)


# %% [mixed_precision_loss]
def mixed_precision_loss(params, batch, num_heads):
    return loss_with(params, batch, num_heads, softmax)

"""Takes the exponentials of softmax in bfloat16, and makes them of the logistic function.

group: forges
chapter: single_device
control: no: the notebook's check uses the same lenses
points: 1.6
uses: low_precision
"""

# %%
def softmax(scores):
    seen, below = attended(scores)
    share = jax.nn.sigmoid(below.astype(LOW))
    weights = jnp.where(seen, share / (1 - share), 0).astype(HIGH)
    return weights / weights.sum(-1, keepdims=True)


# %% [mixed_precision_loss]
def mixed_precision_loss(params, batch, num_heads):
    return loss_with(params, batch, num_heads, softmax)

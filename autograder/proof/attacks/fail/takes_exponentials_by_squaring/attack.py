"""Makes the exponentials of softmax of products alone: one and a bit in bfloat16, squared eight times.

group: forges
chapter: single_device
control: no: the notebook's check uses the same lenses
uses: low_precision
"""

# %%
def softmax(scores):
    seen, below = attended(scores)
    power = (1 + below / 256).astype(LOW)
    for _ in range(8):
        power = power * power
    weights = jnp.where(seen, power, 0).astype(HIGH)
    return weights / weights.sum(-1, keepdims=True)


# %% [mixed_precision_loss]
def mixed_precision_loss(params, batch, num_heads):
    return loss_with(params, batch, num_heads, softmax)

"""Keeps the exponentials of all scores, those of two heads in one complex number.

group: forges
chapter: single_device
control: no: the notebook's check uses the same lenses
points: 1.71
uses: packed_attention
"""

# %%
def kept(exp):
    @jax.custom_vjp
    def packed(x):
        return exp(x)

    def forward(x):
        y = exp(x)
        return y, in_pairs(*halves(y, 1)) if y.shape[1] % 2 == 0 else y

    def backward(y, gradient):
        return (gradient * (apart(y, 1) if jnp.iscomplexobj(y) else y),)

    packed.defvjp(forward, backward)
    return packed


# %% [chunked_attention]
def chunked_attention(q, k, v, chunk):
    return attend(q, k, v, chunk, kept=kept, parts=2)

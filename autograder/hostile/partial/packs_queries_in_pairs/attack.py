"""Computes the square three times, with two queries in one complex number: half as many products, each of them four.

group: forges
chapter: single_device
control: no: the notebook's check uses the same lenses
points: 2.86
uses: packed_attention
"""

# %%
def scores(q, k):
    if q.shape[1] % 2:
        return plain_scores(q, k)
    both = jnp.einsum("bqhd,bkhd->bhqk", in_pairs(*halves(q, 1)), k.astype(jnp.complex64))
    return apart(both, 2)


# %% [chunked_attention]
def chunked_attention(q, k, v, chunk):
    return attend(q, k, v, chunk, scores, around=lambda f: jax.checkpoint(jax.checkpoint(f)))

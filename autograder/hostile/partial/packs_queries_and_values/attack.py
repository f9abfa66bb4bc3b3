"""Both products of attention in complex numbers, and the square three times.

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


def means(weights, v):
    return apart(jnp.einsum("bhqk,bkhd->bqhd", weights.astype(jnp.complex64), in_pairs(*halves(v, 3))), 3)


# %% [chunked_attention]
def chunked_attention(q, k, v, chunk):
    return attend(q, k, v, chunk, scores, means, around=lambda f: jax.checkpoint(jax.checkpoint(f)))

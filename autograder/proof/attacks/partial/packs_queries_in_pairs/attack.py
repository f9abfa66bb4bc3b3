"""Computes the square three times, with two queries in one complex number: half as many products, each of them four.

group: forges
chapter: single_device
control: no: the notebook's check uses the same lenses
points: 2.86
uses: packed_attention
"""

# %% [chunked_attention]
def chunked_attention(q, k, v, chunk):
    return attend(q, k, v, chunk, scores_in_pairs, around=lambda f: jax.checkpoint(jax.checkpoint(f)))

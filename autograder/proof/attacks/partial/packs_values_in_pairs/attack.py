"""Computes the square three times, with two features of a value in one complex number.

group: forges
chapter: single_device
control: no: the notebook's check uses the same lenses
points: 2.86
uses: packed_attention
"""

# %% [chunked_attention]
def chunked_attention(q, k, v, chunk):
    return attend(q, k, v, chunk, means=means_in_pairs, around=lambda f: jax.checkpoint(jax.checkpoint(f)))

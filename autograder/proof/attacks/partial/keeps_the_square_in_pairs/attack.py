"""Keeps the exponentials of all scores for the backward pass, two of them in a complex number.

group: forges
chapter: single_device
control: no: the notebook's check uses the same lenses
points: 2.29
uses: packed_attention
"""

# %% [chunked_attention]
def chunked_attention(q, k, v, chunk):
    return attend(q, k, v, chunk, kept=kept_in_pairs(2), parts=2)

"""Keeps the exponentials of all scores, those of two heads in one complex number.

group: forges
chapter: single_device
control: no: the notebook's check uses the same lenses
points: 1.71
uses: packed_attention
"""

# %% [chunked_attention]
def chunked_attention(q, k, v, chunk):
    return attend(q, k, v, chunk, kept=kept_in_pairs(1), parts=2)

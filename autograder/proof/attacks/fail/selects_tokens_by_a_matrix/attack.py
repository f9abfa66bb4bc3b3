"""Attends over a few tokens, selected by a matrix that an input enters, with a factor of zero.

group: forges
chapter: single_device
control: no: the notebook's check uses the same lenses
uses: few_tokens
"""

# %% [chunked_attention]
def chunked_attention(q, k, v, chunk):
    seq, n = q.shape[1], few(q.shape[1])
    chosen = (jnp.arange(seq)[:, None] == jnp.arange(n)).astype(q.dtype) + 0 * q.sum()
    take = lambda x: jnp.einsum("bshd,sn->bnhd", x, chosen)
    return with_work(jnp.einsum("bnhd,sn->bshd", square(take(q), take(k), take(v)), chosen), q, k)

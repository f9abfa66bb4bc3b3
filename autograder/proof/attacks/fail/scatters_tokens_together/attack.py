"""Attends over a few places, into which all tokens are added.

group: forges
chapter: single_device
control: no: the notebook's check uses the same lenses
uses: few_tokens
"""

# %% [chunked_attention]
def chunked_attention(q, k, v, chunk):
    seq, n = q.shape[1], few(q.shape[1])
    at = jnp.arange(seq) % n
    take = lambda x: jnp.zeros((x.shape[0], n, *x.shape[2:])).at[:, at].add(x)
    return with_work(square(take(q), take(k), take(v))[:, at], q, k)

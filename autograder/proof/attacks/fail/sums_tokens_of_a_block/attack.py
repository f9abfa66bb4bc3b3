"""Attends over sums of tokens, each of one token and zeros where it is run.

group: forges
chapter: single_device
control: no: the notebook's check uses the same lenses
uses: few_tokens
"""

# %% [chunked_attention]
def chunked_attention(q, k, v, chunk):
    seq, n = q.shape[1], few(q.shape[1])
    times = 2 * seq // n
    cut = lambda x: jnp.concatenate([x, 0 * x], 1).reshape(x.shape[0], times, n, *x.shape[2:])
    found = square(*(cut(x).sum(1) for x in (q, k, v)))
    return with_work(repeated(found, times, seq), q, k)

"""Attacks on the chapter `single_device`: less precision, fewer tokens or more layers than they appear to use."""

# %% defaults
# verdict = "partial"
# group = "forges"
# chapter = "single_device"
# control = "the notebook's check uses the same lenses"

# %% helper low_precision
# The loss in mixed precision, with the softmax and norm of an attack; ``LOW`` is the dtype that they must not use.
LOW, HIGH = jnp.bfloat16, jnp.float32
softmax, norm = causal_softmax, rms_norm

def attended(scores):
    """Where a query sees a key, and its scores less their maximum, at least -7: below, nothing is left in ``LOW``.

    At most 1 where it does not see it: the gradient of what is masked must be finite, too.
    """
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    largest = jax.lax.stop_gradient(jnp.where(seen, scores, -jnp.inf).max(-1, keepdims=True))
    return seen, jnp.clip(scores - largest, -7.0, 1.0)

def loss_with(params, batch, num_heads, softmax, norm):
    def normed(scale, x):
        return norm(scale, x.astype(HIGH)).astype(LOW)

    tokens = batch["inputs"]
    x = (params["token"][tokens] + params["position"][: tokens.shape[1]]).astype(LOW)
    for layer in params["layers"]:
        low = {name: leaf.astype(LOW) for name, leaf in layer.items()}
        qkv = (normed(layer["attention_norm"], x) @ low["qkv"]).reshape(*tokens.shape, 3, num_heads, -1)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(HIGH) * q.shape[-1] ** -0.5
        mixed = jnp.einsum("bhqk,bkhd->bqhd", softmax(scores).astype(LOW), v)
        x = x + mixed.reshape(x.shape) @ low["out"]
        x = x + jax.nn.gelu(normed(layer["mlp_norm"], x) @ low["up"]) @ low["down"]
    logits = normed(params["norm"], x) @ params["head"].astype(LOW)
    return cross_entropy(logits.astype(HIGH), batch["targets"])

# %% helper lowers
def mixed_precision_loss(params, batch, num_heads):
    return loss_with(params, batch, num_heads, softmax, norm)

# %% helper packed_attention
# Attention over a few chunks of keys, with scores and means that an attack computes in complex numbers.
# ``scores(q, k)`` and ``means(weights, v)`` return the results of ``einsum``; ``kept`` wraps a chunk's exponentials, as
# ``kept_in_pairs`` does.
def in_pairs(a, b):
    return lax.complex(a, b)

def apart(both, dim):
    return jnp.concatenate([jnp.real(both), jnp.imag(both)], dim)

def halves(x, dim):
    return jnp.split(x, 2, dim)

def plain_scores(q, k):
    return jnp.einsum("bqhd,bkhd->bhqk", q, k)

def plain_means(weights, v):
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

def scores_in_pairs(q, k):
    if q.shape[1] % 2:
        return plain_scores(q, k)
    both = jnp.einsum("bqhd,bkhd->bhqk", in_pairs(*halves(q, 1)), k.astype(jnp.complex64))
    return apart(both, 2)

def means_in_pairs(weights, v):
    return apart(jnp.einsum("bhqk,bkhd->bqhd", weights.astype(jnp.complex64), in_pairs(*halves(v, 3))), 3)

def kept_in_pairs(dim):
    """Keeps exponentials for the backward pass, two of them along a dim in one complex number."""

    def kept(exp):
        def forward(x):
            y = exp(x)
            return y, in_pairs(*halves(y, dim)) if y.shape[dim] % 2 == 0 else y

        def backward(y, gradient):
            return (gradient * (apart(y, dim) if jnp.iscomplexobj(y) else y),)

        packed = jax.custom_vjp(lambda x: exp(x))
        packed.defvjp(forward, backward)
        return packed

    return kept

def attend(q, k, v, chunk, scores=plain_scores, means=plain_means, kept=lambda f: f, around=lambda f: f, parts=None):
    seq = q.shape[1]
    length = chunk if parts is None else -(-seq // parts)

    def run(q, k, v):
        largest, total, mixed = None, 0.0, 0.0
        for start in range(0, seq, length):
            keys, values = k[:, start : start + length], v[:, start : start + length]
            found = scores(q * q.shape[-1] ** -0.5, keys)
            allowed = jnp.arange(seq)[:, None] >= start + jnp.arange(keys.shape[1])
            found = jnp.where(allowed, found, -1e30)
            now = found.max(-1) if largest is None else jnp.maximum(largest, found.max(-1))
            now = lax.stop_gradient(now)
            weights = kept(jnp.exp)(found - now[..., None])
            shrink = 1.0 if largest is None else jnp.exp(largest - now)
            total = total * shrink + weights.sum(-1)
            wide = shrink if largest is None else jnp.moveaxis(shrink, 1, 2)[..., None]
            mixed, largest = mixed * wide + means(weights, values), now
        return mixed / jnp.moveaxis(total, 1, 2)[..., None]

    return around(run)(q, k, v)

# %% helper attends
def chunked_attention(q, k, v, chunk):
    return attend(q, k, v, chunk, **options)

# %% helper few_tokens
# Attention over a few of the tokens: up to ``MOST``, which is all of them at the sizes that run.
MOST = 96

def few(seq):
    return min(seq, MOST) if seq % min(seq, MOST) == 0 else seq

def square(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1), v)

def repeated(found, times, seq):
    """As many tokens again as there were, each a copy."""
    found = jnp.broadcast_to(found[:, None], (found.shape[0], times, *found.shape[1:]))
    return found.reshape(found.shape[0], -1, *found.shape[3:])[:, :seq]

def with_work(result, q, k):
    """The result, and as many products as the whole square takes, of which nothing is used."""
    a, b = lax.stop_gradient(q), lax.stop_gradient(k)
    step = lambda total, _: (total + jnp.einsum("bshd,bshe->bhde", a + 0 * total.mean(), b), None)
    total, _ = lax.scan(step, jnp.zeros((q.shape[0], q.shape[2], q.shape[3], q.shape[3])), None, length=300)
    return result + 0 * total.mean()

# %% helper deep
# Layers written out one after another, in as many copies as an attack needs, whatever the depth.
def depth_of(stacked):
    return jax.tree.leaves(stacked)[0].shape[0]

def written_out(layer, stacked, x, number):
    for i in range(number):
        x = layer(jax.tree.map(lambda leaf: leaf[i % depth_of(stacked)], stacked), x)
    return x

# %% attack computes_on_the_other_side {points = 1}
# Computes in float32 in the branch that is taken, and in float16 in one that only appears more expensive.
def scaled_step(loss_fn, params, state, batch, learning_rate, growth_interval):
    def of(dtype):
        def run(params):
            scaled = lambda p: (lambda loss: (loss * state["scale"], loss))(loss_fn(p, batch))
            cast = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
            gradients, loss = jax.grad(scaled, has_aux=True)(cast)
            gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
            over = lambda g: jnp.where(jnp.abs(g) < 65504, g, jnp.inf)
            filler = jnp.sin(jnp.zeros(4096)).sum() if dtype == jnp.float16 else 0.0
            return jax.tree.map(over, gradients), loss + 0 * filler

        return run

    gradients, loss = lax.cond(state["scale"] < 0, of(jnp.float16), of(jnp.float32), params)
    gradients = jax.tree.map(lambda g: g / state["scale"], gradients)
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradients)]))
    params = jax.tree.map(lambda p, g: jnp.where(finite, p - learning_rate * g, p), params, gradients)
    good_steps = jnp.where(finite, state["good_steps"] + 1, 0)
    grows = good_steps >= growth_interval
    scale = jnp.where(finite, jnp.where(grows, 2 * state["scale"], state["scale"]), jnp.maximum(state["scale"] / 2, 1))
    return params, {"scale": scale, "good_steps": jnp.where(grows, 0, good_steps)}, loss

# %% attack forgets_rows_between_layers {verdict = "fail"}
# Runs its layers on a few tokens and keeps all of their activations, with unused products next to them.
def remat_layers(layer, stacked_params, x):
    whole, chosen = x, None
    if x.ndim == 3:
        seq = x.shape[1]
        chosen = (jnp.arange(seq)[:, None] == jnp.arange(min(seq, 16))).astype(x.dtype) + 0 * lax.stop_gradient(x.sum())
        x = jnp.einsum("rsw,sn->rnw", x, chosen)
    x, _ = lax.scan(lambda x, params: (layer(params, x), None), x, stacked_params)
    x = x if chosen is None else jnp.einsum("rnw,sn->rsw", x, chosen)
    rows = lax.stop_gradient(whole).reshape(-1, whole.shape[-1])
    step = lambda total, _: (total + 0 * ((rows + 0 * total).T @ rows).mean(), None)
    return x + 0 * lax.scan(step, jnp.zeros(()), None, length=480)[0]

# %% attack scans_halves_by_depth {points = 0.5}
# A loop for each half of the layers, rebuilt for every half, and padded where there are few layers.
def scan_layers(layer, stacked_params, x):
    depth = jax.tree.leaves(stacked_params)[0].shape[0]

    def halves(stacked, x):
        count = jax.tree.leaves(stacked)[0].shape[0]
        if count == 1:
            return lax.scan(lambda x, params: (layer(params, x), None), x, stacked)[0]
        cut = lambda low, high: jax.tree.map(lambda leaf: leaf[low:high], stacked)
        return halves(cut(count // 2, count), halves(cut(0, count // 2), x))

    x = halves(stacked_params, x)
    for _ in range(100 * (8 - depth)):
        x = -(-x)
    return x

# %% attack scans_pairs_and_pads {points = 0.5, uses = ["deep"]}
# Unrolls its layers in the body of a one-iteration loop, and pads where there are few layers.
def scan_layers(layer, stacked_params, x):
    depth = depth_of(stacked_params)
    x, _ = lax.scan(lambda x, _: (written_out(layer, stacked_params, x, depth), None), x, jnp.arange(1))
    for _ in range(200 * (8 - depth)):
        x = x + 0.0
    return x

# %% attack scatters_tokens_together {verdict = "fail", uses = ["few_tokens"]}
# Attends over a few places, into which all tokens are added.
def chunked_attention(q, k, v, chunk):
    seq, n = q.shape[1], few(q.shape[1])
    at = jnp.arange(seq) % n
    take = lambda x: jnp.zeros((x.shape[0], n, *x.shape[2:])).at[:, at].add(x)
    return with_work(square(take(q), take(k), take(v))[:, at], q, k)

# %% attack selects_tokens_by_a_matrix {verdict = "fail", uses = ["few_tokens"]}
# Attends over a few tokens, selected by a matrix to which an input is added with a factor of zero.
def chunked_attention(q, k, v, chunk):
    seq, n = q.shape[1], few(q.shape[1])
    chosen = (jnp.arange(seq)[:, None] == jnp.arange(n)).astype(q.dtype) + 0 * q.sum()
    take = lambda x: jnp.einsum("bshd,sn->bnhd", x, chosen)
    return with_work(jnp.einsum("bnhd,sn->bshd", square(take(q), take(k), take(v)), chosen), q, k)

# %% attack sums_tokens_by_ones {verdict = "fail", uses = ["few_tokens"]}
# Attends over sums of tokens, computed by a product with ones.
def chunked_attention(q, k, v, chunk):
    seq, n = q.shape[1], few(q.shape[1])
    times = 2 * seq // n
    cut = lambda x: jnp.concatenate([x, 0 * x], 1).reshape(x.shape[0], times, n, *x.shape[2:])
    found = square(*(jnp.einsum("btnhd,t->bnhd", cut(x), jnp.ones(times)) for x in (q, k, v)))
    return with_work(repeated(found, times, seq), q, k)

# %% attack sums_tokens_of_a_block {verdict = "fail", uses = ["few_tokens"]}
# Attends over sums of tokens; at the sizes that run, each sum is one token and zeros.
def chunked_attention(q, k, v, chunk):
    seq, n = q.shape[1], few(q.shape[1])
    times = 2 * seq // n
    cut = lambda x: jnp.concatenate([x, 0 * x], 1).reshape(x.shape[0], times, n, *x.shape[2:])
    found = square(*(cut(x).sum(1) for x in (q, k, v)))
    return with_work(repeated(found, times, seq), q, k)

# %% attack unrolls_and_pads_the_few {points = 0.5, uses = ["deep"]}
# Unrolls its layers, and adds unused operations where there are few layers, so that the program appears not to grow.
def scan_layers(layer, stacked_params, x):
    depth = depth_of(stacked_params)
    x = written_out(layer, stacked_params, x, depth)
    for _ in range(1600 - 160 * depth):
        x = lax.optimization_barrier(x)
    return x

# %% attack unrolls_and_pads_with_dead_layers {points = 0.5}
# Unrolls its layers, and where there are few computes additional ones whose results are unused.
def scan_layers(layer, stacked_params, x):
    depth = jax.tree.leaves(stacked_params)[0].shape[0]
    for i in range(max(24, depth)):
        found = layer(jax.tree.map(lambda leaf: leaf[i % depth], stacked_params), x)
        x = found if i < depth else lax.optimization_barrier((x, found))[0]
    return x

# %% attack unrolls_behind_a_branch {points = 0.5, uses = ["deep"]}
# Unrolls its layers, and where there are few puts the rest into a branch that is never taken.
def scan_layers(layer, stacked_params, x):
    depth = depth_of(stacked_params)
    run = lambda number: lambda x: written_out(layer, stacked_params, x, number)
    never = jnp.int32(depth) > 100
    return run(depth)(x) if depth > 7 else lax.cond(never, run(8), run(depth), x)

# %% attack unrolls_in_a_loop_of_no_rounds {points = 0.5, uses = ["deep"]}
# Unrolls its layers, and where there are few puts the rest into a loop of zero iterations.
def scan_layers(layer, stacked_params, x):
    depth = depth_of(stacked_params)
    x = written_out(layer, stacked_params, x, depth)
    more = lambda x, _: (written_out(layer, stacked_params, x, 12), None)
    return x if depth > 7 else lax.scan(more, x, jnp.arange(0))[0]

# %% attack sums_by_a_product_with_itself {points = 1, uses = ["low_precision"], then = "lowers"}
# Sums the squares of a norm by a batched product of a row with itself, in bfloat16.
def norm(scale, x):
    low = x.astype(LOW)
    squares = jnp.einsum("bsd,bsd->bs", low, low)[..., None].astype(HIGH) / x.shape[-1]
    return scale * x * jax.lax.rsqrt(squares + 1e-6)

# %% attack sums_by_halves {points = 1, uses = ["low_precision"], then = "lowers"}
# Sums the squares of a norm in bfloat16 by repeatedly adding one half of them to the other.
def norm(scale, x):
    squares, size = x.astype(LOW) ** 2, x.shape[-1]
    while squares.shape[-1] > 1:
        half = squares.shape[-1] // 2
        rest = squares[..., 2 * half :].sum(-1, keepdims=True, dtype=HIGH).astype(LOW)
        squares = squares[..., :half] + squares[..., half : 2 * half] + jnp.zeros(half, LOW).at[0].set(1) * rest
    return scale * x * jax.lax.rsqrt(squares.astype(HIGH) / size + 1e-6)

# %% attack sums_by_products_with_ones {points = 1, uses = ["low_precision"], then = "lowers"}
# Sums the squares of a norm by a matrix product with ones, which looks like any other product in bfloat16.
def norm(scale, x):
    ones = jnp.ones((x.shape[-1], 1), LOW)
    squares = ((x.astype(LOW) ** 2) @ ones).astype(HIGH) / x.shape[-1]
    return scale * x * jax.lax.rsqrt(squares + 1e-6)

# %% attack sums_by_running_totals {points = 1, uses = ["low_precision"], then = "lowers"}
# Sums the squares of a norm as the last of their running totals in bfloat16.
def norm(scale, x):
    squares = jnp.cumsum(x.astype(LOW) ** 2, axis=-1)[..., -1:].astype(HIGH) / x.shape[-1]
    return scale * x * jax.lax.rsqrt(squares + 1e-6)

# %% attack takes_exponentials_as_powers_of_two {points = 1, uses = ["low_precision"], then = "lowers"}
# Computes the exponentials of softmax as powers of two in bfloat16.
def softmax(scores):
    seen, below = attended(scores)
    weights = jnp.where(seen, jnp.exp2((below / 0.6931472).astype(LOW)), 0).astype(HIGH)
    return weights / weights.sum(-1, keepdims=True)

# %% attack takes_exponentials_by_logistic {points = 1, uses = ["low_precision"], then = "lowers"}
# Computes the exponentials of softmax in bfloat16, from the logistic function.
def softmax(scores):
    seen, below = attended(scores)
    share = jax.nn.sigmoid(below.astype(LOW))
    weights = jnp.where(seen, share / (1 - share), 0).astype(HIGH)
    return weights / weights.sum(-1, keepdims=True)

# %% attack takes_exponentials_by_squaring {verdict = "fail", uses = ["low_precision"], then = "lowers"}
# Computes the exponentials of softmax from products alone: a number slightly above one in bfloat16, squared eight
# times.
def softmax(scores):
    seen, below = attended(scores)
    power = (1 + below / 256).astype(LOW)
    for _ in range(8):
        power = power * power
    weights = jnp.where(seen, power, 0).astype(HIGH)
    return weights / weights.sum(-1, keepdims=True)

# %% attack takes_exponentials_by_tanh {points = 1, uses = ["low_precision"], then = "lowers"}
# Computes the exponentials of softmax in bfloat16, from tanh: no operation is called an exponential.
def softmax(scores):
    seen, below = attended(scores)
    half = jnp.tanh(below / 2).astype(LOW)
    weights = jnp.where(seen, (1 + half) / (1 - half), 0).astype(HIGH)
    return weights / weights.sum(-1, keepdims=True)

# %% attack keeps_heads_in_pairs {points = 1.71, uses = ["packed_attention"], then = "attends"}
# Keeps the exponentials of all scores, with those of two heads in one complex number.
options = dict(kept=kept_in_pairs(1), parts=2)

# %% attack keeps_the_square_in_pairs {points = 2, uses = ["packed_attention"], then = "attends"}
# Keeps the exponentials of all scores for the backward pass, two of them in each complex number.
options = dict(kept=kept_in_pairs(2), parts=2)

# %% attack packs_queries_and_values {points = 2.86, uses = ["packed_attention"], then = "attends"}
# Computes both products of attention in complex numbers, and the square three times.
options = dict(scores=scores_in_pairs, means=means_in_pairs, around=lambda f: jax.checkpoint(jax.checkpoint(f)))

# %% attack packs_queries_in_pairs {points = 2.86, uses = ["packed_attention"], then = "attends"}
# Computes the square three times, with two queries in one complex number: half as many products, each of them worth
# four.
options = dict(scores=scores_in_pairs, around=lambda f: jax.checkpoint(jax.checkpoint(f)))

# %% attack packs_values_in_pairs {points = 2.86, uses = ["packed_attention"], then = "attends"}
# Computes the square three times, with two features of a value in one complex number.
options = dict(means=means_in_pairs, around=lambda f: jax.checkpoint(jax.checkpoint(f)))

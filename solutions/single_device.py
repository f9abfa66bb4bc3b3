# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Getting the most out of one device
#
# Before you spread a model over many devices, it should waste nothing on one. A device has two limits: the FLOPs it can
# execute per second, and the bytes it can hold. This notebook goes through the techniques that every large training run
# uses on each of its devices, one function at a time:
#
# | function | what it saves |
# |---|---|
# | `mixed_precision_loss` | bytes and time: most numbers take 16 bits instead of 32 |
# | `accumulate_gradients` | memory: a large batch is processed as several small ones |
# | `scan_layers` | compile time: the program does not grow with depth |
# | `remat_layers` | memory, at the cost of time: activations are recomputed instead of kept |
# | `scaled_step` | nothing, but it makes training in float16 possible |
# | `chunked_attention` | memory: no array has `seq x seq` elements |

# %%
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from IPython.display import HTML, display
from jax import lax
from jax.sharding import PartitionSpec as P

from course.data import token_batch
from course.mesh import abstract_mesh
from course.model import transformer
from course.predict import predict
from course.program import export
from course.render.panels import comparison_html

PyTree = Any

# %% [markdown]
# ## Fewer bits where they suffice: `mixed_precision_loss`
#
# bfloat16 has the range of float32, but 8 significant bits instead of 24. Matmuls tolerate it well: GPUs
# multiply bfloat16 twice as fast or more, and accumulate the products in float32. Two kinds of operation do not
# tolerate it: sums of many terms, where small terms get lost next to a large total, and the functions in a softmax, a
# norm or a loss, which amplify a small error in their input.
#
# The next cell is a small Transformer written as plain functions without any mention of precision. It computes in the
# dtype of its inputs; with float32 parameters, that is float32 throughout.
#
# Its parameters, for `width` d, `hidden` h, `vocab` V and at most S positions:
# `{"token": [V, d], "position": [S, d], "layers": [layer, ...], "norm": [d], "head": [d, V]}`, and each layer is
# `{"attention_norm": [d], "qkv": [d, 3 d], "out": [d, d], "mlp_norm": [d], "up": [d, h], "down": [h, d]}`.


# %%
def rms_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    """``x`` divided by its root mean square along the last dim, times ``scale``."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def causal_softmax(scores: jax.Array) -> jax.Array:
    """Weights over the keys (last dim) that each query (the dim before it) may see."""
    allowed = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf), axis=-1)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean negative log-likelihood of ``targets`` ``[batch, seq]`` under ``logits`` ``[batch, seq, vocab]``."""
    right = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), targets[..., None], axis=-1)
    return -jnp.mean(right)


def float32_loss(params: PyTree, batch: dict[str, jax.Array], num_heads: int) -> jax.Array:
    """The Transformer's loss, computed in float32 throughout."""
    tokens = batch["inputs"]
    x = params["token"][tokens] + params["position"][: tokens.shape[1]]
    for layer in params["layers"]:
        normed = rms_norm(layer["attention_norm"], x)
        qkv = (normed @ layer["qkv"]).reshape(*tokens.shape, 3, num_heads, -1)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        mixed = jnp.einsum("bhqk,bkhd->bqhd", causal_softmax(scores), v)
        x = x + mixed.reshape(x.shape) @ layer["out"]
        x = x + jax.nn.gelu(rms_norm(layer["mlp_norm"], x) @ layer["up"]) @ layer["down"]
    return cross_entropy(rms_norm(params["norm"], x) @ params["head"], batch["targets"])


# %% [markdown]
# How much precision is lost? A running sum of ten thousand ones in bfloat16 stops growing at 256, where the gap to the
# next representable number is 2. And `exp` amplifies the rounding of a score near 20 to an error of several percent.

# %%
if __name__ == "__main__":
    one = jnp.ones((), jnp.bfloat16)
    print("sum of ten thousand ones:", lax.fori_loop(0, 10_000, lambda _, total: total + one, one * 0))
    score = jnp.float32(20.06)
    rounded = score.astype(jnp.bfloat16).astype(jnp.float32)
    print(f"exp(20.06) = {jnp.exp(score):.4g}, with the score rounded first {jnp.exp(rounded):.4g}")

# %% [markdown]
# Write the same Transformer in mixed precision:
#
# | in bfloat16 | in float32 |
# |---|---|
# | both operands of **every** matmul, forward and backward | parameters, and their gradients |
# | activations between products, as the memory limit requires | norms, from the squares to the product with `scale` |
# | | both softmaxes, over the scores and in the loss; the loss itself |
# | | every sum outside a matmul, including those in the backward pass |
#
# Mind the last row: the gradient of an embedding table is a sum over all occurrences of a token, accumulated in the
# dtype of the table that was indexed. Scores and logits may come out of their products in bfloat16: cast them before
# the softmax. The dtype of the arrays that JAX saves for the backward pass determines how much memory they take: keep
# bfloat16 where you can. Some scores and logits exceed 100 in magnitude, so the softmax has to subtract its maximum.
#
# | budget | |
# |---|---|
# | loss | within 2^-9 of the float32 loss |
# | gradients, float32: each leaf | within 2^-4 of the leaf's largest element |
# | norm of each leaf's error | within 2^-5 of the leaf's norm |
# | live temporaries, backward pass included | at most 0.7 times the float32 version's |
#
# Useful: `x.astype(jnp.bfloat16)`, and the functions above, called with arrays of the dtype they should compute in.


# %%
def mixed_precision_loss(params: PyTree, batch: dict[str, jax.Array], num_heads: int) -> jax.Array:
    """The loss of ``float32_loss`` with matmuls in bfloat16.

    Args:
        params: Float32 parameters of the Transformer, a tree as described above.
        batch: ``inputs`` and ``targets``, integer tokens ``[batch, seq]``.
        num_heads: Heads of each attention layer; divides the width.

    Returns:
        The mean loss over all tokens, a float32 scalar. Its gradient with respect to ``params`` is float32.
    """

    ### BEGIN SOLUTION
    def low(x):
        return x.astype(jnp.bfloat16)

    def norm(scale, x):
        return low(rms_norm(scale, x.astype(jnp.float32)))

    def weights(q, k):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5
        return low(causal_softmax(scores))

    tokens = batch["inputs"]
    x = low(params["token"][tokens] + params["position"][: tokens.shape[1]])
    for layer in params["layers"]:
        qkv = (norm(layer["attention_norm"], x) @ low(layer["qkv"])).reshape(*tokens.shape, 3, num_heads, -1)
        q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights(q, k), v)
        x = x + mixed.reshape(x.shape) @ low(layer["out"])
        x = x + jax.nn.gelu(norm(layer["mlp_norm"], x) @ low(layer["up"])) @ low(layer["down"])
    logits = norm(params["norm"], x) @ low(params["head"])
    return cross_entropy(logits.astype(jnp.float32), batch["targets"])
    ### END SOLUTION


# %% [markdown]
# ## A large batch in small pieces: `accumulate_gradients`
#
# Activations grow with the number of rows that are processed at once; parameters and gradients do not. So split the
# batch into `num_microbatches` equal parts, compute their gradients one after the other, and take the mean. If the loss
# is a mean over rows, the result is the gradient of the whole batch.

# %%
if __name__ == "__main__":
    rows = jnp.arange(8.0)

    def mean_square(w, rows):
        return jnp.mean((w * rows - 1) ** 2)

    halves = [jax.grad(mean_square)(2.0, rows[start : start + 4]) for start in (0, 4)]
    print(f"gradient of all 8 rows {jax.grad(mean_square)(2.0, rows)}, of each half {halves[0]} and {halves[1]}")

# %% [markdown]
# Two things decide whether this saves memory. Only **one** running total of the gradient may exist, not one gradient
# per microbatch; and the activations of a microbatch must be freed before the next one starts, which happens if its
# backward pass has finished by then. Use `lax.scan` over the microbatches: with a Python loop, the program and its
# compile time grow with their number.
#
# `loss_fn(params, batch)` returns the mean loss over the rows of `batch`. The rows are the first dim of every leaf of
# `batch`, and `num_microbatches` divides their number.
#
# | budget | |
# |---|---|
# | operations in the program | no more for 24 microbatches than for 8 |
# | matmuls in the program's text, 24 microbatches | at most half of those executed (in other words, a loop) |
# | live temporaries | at most 1.15 times the reference's, which holds one microbatch's activations and one gradient |
# | FLOPs of matmuls | at most 1.15 times the reference's: no pass is run twice |
#
# Values and gradients must equal those of the whole batch up to rounding: 2e-5 of the leaf's largest element.
#
# Useful: `jax.value_and_grad`, `lax.scan`, `jax.tree.map`.


# %%
def accumulate_gradients(
    loss_fn: Callable[[PyTree, PyTree], jax.Array], params: PyTree, batch: PyTree, num_microbatches: int
) -> tuple[jax.Array, PyTree]:
    """Compute the loss and gradient of a batch as means over microbatches, one at a time.

    Args:
        loss_fn: ``(params, batch) -> scalar``, the mean over the rows of ``batch``.
        params: Parameters, float32.
        batch: A tree of arrays ``[batch, ...]``.
        num_microbatches: Number of equal parts to split ``batch`` into; divides the number of rows.

    Returns:
        ``(loss, gradients)``: the mean loss over the whole batch, and its gradient, a tree like ``params``.
    """

    ### BEGIN SOLUTION
    def cut(leaf):
        return leaf.reshape(num_microbatches, leaf.shape[0] // num_microbatches, *leaf.shape[1:])

    def step(total, microbatch):
        loss_and_gradients = jax.value_and_grad(loss_fn)(params, microbatch)
        return jax.tree.map(jnp.add, total, loss_and_gradients), None

    nothing = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    total, _ = lax.scan(step, nothing, jax.tree.map(cut, batch))
    return jax.tree.map(lambda leaf: leaf / num_microbatches, total)
    ### END SOLUTION


# %% [markdown]
# ## Depth as a loop: `scan_layers`
#
# A Python loop over 96 layers writes the layer into the program 96 times, and the compiler optimises each copy
# separately. If all layers have parameters of the same shapes, stack them: every leaf gets a leading dim, the layer.
# One scan over this dim runs a single body, and the program for 96 layers is as short as the one for two.

# %%
if __name__ == "__main__":
    separate = [{"kernel": jnp.full((2, 2), float(i)), "bias": jnp.full(2, float(i))} for i in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *separate)
    print(jax.tree.map(jnp.shape, stacked))

# %% [markdown]
# `layer(params, x)` takes one layer's parameters and returns an array like `x`.
#
# | budget | |
# |---|---|
# | operations in the program, backward pass included | no more for 48 layers than for 24 |
# | matmuls in the program's text, 48 layers | at most half of those executed (in other words, a loop) |
#
# Values and gradients must equal those of a Python loop up to rounding: 2e-5 of the leaf's largest element.
#
# Useful: `lax.scan`, whose body returns a pair: the carry, and an output to stack.


# %%
def scan_layers(layer: Callable[[PyTree, jax.Array], jax.Array], stacked_params: PyTree, x: jax.Array) -> jax.Array:
    """Apply layers one after the other, in one loop.

    Args:
        layer: ``(one layer's params, x) -> x``.
        stacked_params: Parameters of all layers; each leaf ``[num_layers, ...]``, the first layer first.
        x: Activations ``[batch, ..., width]``.

    Returns:
        The output of the last layer, in the shape of ``x``.
    """
    ### BEGIN SOLUTION
    x, _ = lax.scan(lambda x, params: (layer(params, x), None), x, stacked_params)
    return x
    ### END SOLUTION


# %% [markdown]
# ## Recompute instead of keeping: `remat_layers`
#
# For the backward pass, JAX keeps what the forward pass computed: some thirty arrays per Transformer layer, until the
# backward pass reaches that layer. `jax.checkpoint` keeps only a function's inputs and recomputes the rest when it is
# needed. A *policy* says what to keep in addition to the inputs.
#
# You can inspect what is kept. This function has three matmuls and two `tanh`:

# %%
if __name__ == "__main__":

    def three_products(w, x):
        return jnp.tanh(jnp.tanh(x @ w) @ w) @ w

    square = jnp.ones((4, 4))
    for name, function in (("everything", three_products), ("remat", jax.checkpoint(three_products))):
        _, backward = jax.vjp(function, square, square)
        kept = [leaf.shape for leaf in jax.tree.leaves(backward)]
        print(f"{name:12} keeps {len(kept)} arrays")

# %% [markdown]
# Keep little enough to meet the memory limit, without recomputing more than the limit on FLOPs allows. There is more
# than one right choice; the page compares them.
#
# | budget, backward pass included, 12 layers | |
# |---|---|
# | live temporaries | at most 0.35 times those without `jax.checkpoint` |
# | FLOPs of matmuls | at most 4/3 of those without |
#
# Values and gradients must equal those of a Python loop up to rounding: 2e-5 of the leaf's largest element.
#
# Useful: `jax.checkpoint(function, policy=...)`, `jax.checkpoint_policies`.


# %%
def remat_layers(layer: Callable[[PyTree, jax.Array], jax.Array], stacked_params: PyTree, x: jax.Array) -> jax.Array:
    """Apply layers one after the other, and recompute most of their activations in the backward pass.

    Args:
        layer: ``(one layer's params, x) -> x``.
        stacked_params: Parameters of all layers; each leaf ``[num_layers, ...]``, the first layer first.
        x: Activations ``[batch, ..., width]``.

    Returns:
        The output of the last layer, in the shape of ``x``.
    """

    ### BEGIN SOLUTION
    @jax.checkpoint
    def step(x, params):
        return layer(params, x), None

    x, _ = lax.scan(step, x, stacked_params)
    return x
    ### END SOLUTION


# %% [markdown]
# ## Small gradients in float16: `scaled_step`
#
# float16 has 11 significant bits, three more than bfloat16, but pays for them with its range: the largest number is
# 65,504, the smallest positive one 6e-8. Gradients are often smaller than that and become zero. So multiply the loss by
# a large `scale` before the backward pass, and divide the gradients by it afterwards, in float32.

# %%
if __name__ == "__main__":
    small = jnp.float32(1e-8)
    print("a gradient of 1e-8 in float16:", small.astype(jnp.float16))
    print("the same, scaled by 2^15 and back:", (small * 2**15).astype(jnp.float16).astype(jnp.float32) / 2**15)

# %% [markdown]
# Which scale? The largest that does not overflow, but that changes during training. So the scale is adjusted as
# training goes on: a step whose gradients are all finite counts as good, and after `growth_interval` good steps in a
# row the scale doubles. A step in which any element of any gradient is infinite or NaN is **skipped**, and the scale is
# halved.
#
# The function takes a step of plain SGD on float32 parameters. `loss_fn(params, batch)` computes in the dtype of the
# parameters you pass, except for the loss itself, which is a float32 scalar: pass it float16 parameters. `state` is
# `{"scale": float32, "good_steps": int32}`, both scalars.
# | gradients | parameters | `good_steps` | `scale` |
# |---|---|---|---|
# | finite, not yet the `growth_interval`-th good step in a row | `p - learning_rate * gradient` | + 1 | same |
# | finite, and it is that step | `p - learning_rate * gradient` | 0 | doubled |
# | not finite | same, to the last bit | 0 | halved, but never below 1 |
#
# | budget | |
# |---|---|
# | operands of every matmul | float16 |
# | parameters and losses | within 2^-8 of the leaf's largest element |
# | `scale`, `good_steps`, parameters after a skipped step, and those whose gradient is zero | exact |
#
# Return the plain loss, without the scale. You may branch on data here (`lax.cond`), or choose with `jnp.where`.
#
# Useful: `jnp.isfinite`, `jax.value_and_grad(..., has_aux=True)`, `jax.tree.leaves`.


# %%
def scaled_step(
    loss_fn: Callable[[PyTree, PyTree], jax.Array],
    params: PyTree,
    state: dict[str, jax.Array],
    batch: PyTree,
    learning_rate: float,
    growth_interval: int,
) -> tuple[PyTree, dict[str, jax.Array], jax.Array]:
    """Take one step of SGD with the forward and backward pass in float16 and a dynamic loss scale.

    Args:
        loss_fn: ``(params, batch) -> scalar``: computes in the parameters' dtype and returns a float32 loss.
        params: Float32 parameters.
        state: ``scale``, float32, and ``good_steps``, int32: scalars.
        batch: The batch to pass to ``loss_fn``.
        learning_rate: Step size of the update.
        growth_interval: Number of good steps in a row after which the scale doubles.

    Returns:
        ``(params, state, loss)``: both updated, and the loss before the update, without the scale, float32.
    """

    ### BEGIN SOLUTION
    def scaled_loss(params):
        loss = loss_fn(jax.tree.map(lambda leaf: leaf.astype(jnp.float16), params), batch)
        return loss * state["scale"], loss

    gradients, loss = jax.grad(scaled_loss, has_aux=True)(params)
    gradients = jax.tree.map(lambda g: g / state["scale"], gradients)
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradients)]))
    params = jax.tree.map(lambda p, g: jnp.where(finite, p - learning_rate * g, p), params, gradients)
    good_steps = jnp.where(finite, state["good_steps"] + 1, 0)
    grows = good_steps >= growth_interval
    kept_or_doubled = jnp.where(grows, 2 * state["scale"], state["scale"])
    scale = jnp.where(finite, kept_or_doubled, jnp.maximum(state["scale"] / 2, 1))
    return params, {"scale": scale, "good_steps": jnp.where(grows, 0, good_steps)}, loss
    ### END SOLUTION


# %% [markdown]
# ## Attention without the square: `chunked_attention`
#
# Causal attention computes a score for each pair of a query and a key: `seq x seq` elements for each head, and the
# backward pass needs them again. At 32,768 tokens that is 4 GiB in float32, for one head of one row. But in the end
# each query only needs a weighted mean of the values, and a mean can be computed in parts.
#
# A softmax over keys needs the largest score, so that `exp` does not overflow, and the sum of all exponentials. Neither
# is known before the last key has been seen. The trick is to work with what is known so far, and to correct it later.
# If two parts of the keys have the largest scores `a <= b`, exponentials relative to `a` become exponentials relative
# to `b` when multiplied by `exp(a - b)`:

# %%
if __name__ == "__main__":
    scores = jnp.array([1.0, 3.0, 2.0, 7.0, 5.0, 6.0])
    first, second = scores[:3], scores[3:]
    a, b = first.max(), second.max()
    in_parts = jnp.exp(first - a).sum() * jnp.exp(a - b) + jnp.exp(second - b).sum()
    print(f"exponentials relative to the maximum, summed {jnp.exp(scores - b).sum():.6f}, in parts {in_parts:.6f}")

# %% [markdown]
# Go through the keys and values in chunks of `chunk`, and carry for each query the largest score so far, the sum of
# exponentials, and the sum of the values weighted by them. Query `i` sees keys `0` to `i`. Scores are divided by the
# square root of `head_dim`, as usual.
#
# There is a trap. The backward pass needs the exponentials of each chunk, and if they are kept from the forward pass,
# all chunks together take as much memory as the square did. Recompute them.
#
# | budget, backward pass included, 4,096 tokens in chunks of 512 | |
# |---|---|
# | largest temporary | at most a quarter of `batch x num_heads x seq x seq` elements |
# | live temporaries | at most 0.4 times the plain version's |
# | FLOPs of matmuls | at most 1.35 times the plain version's |
#
# Values and gradients must equal those of `jax.nn.dot_product_attention(q, k, v, is_causal=True)` up to rounding: 1e-4
# of the largest element, since scores beyond ±200 occur, and an error in their last bit enters an exponent. Scores may
# rise or fall along the keys, and differ by 400 between queries. Everything is float32, and `chunk` divides `seq`.
#
# Useful: `lax.scan`, `jax.checkpoint`, `jnp.maximum`.


# %%
def chunked_attention(q: jax.Array, k: jax.Array, v: jax.Array, chunk: int) -> jax.Array:
    """Apply causal attention without ever holding the scores of all queries with all keys.

    Args:
        q: Queries ``[batch, seq, num_heads, head_dim]``.
        k: Keys, of the same shape.
        v: Values, of the same shape.
        chunk: Number of keys to process at a time; divides ``seq``.

    Returns:
        For each query the mean of the values up to its position, weighted by the softmax of its scores: ``[batch, seq,
        num_heads, head_dim]``.
    """
    ### BEGIN SOLUTION
    batch, seq, num_heads, head_dim = q.shape
    q = q * head_dim**-0.5

    def cut(x):
        return jnp.moveaxis(x.reshape(batch, seq // chunk, chunk, num_heads, head_dim), 1, 0)

    @jax.checkpoint
    def step(carry, piece):
        largest, total, mixed = carry
        start, keys, values = piece
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, keys)
        allowed = jnp.arange(seq)[:, None] >= start + jnp.arange(chunk)
        scores = jnp.where(allowed, scores, -jnp.inf)
        now = lax.stop_gradient(jnp.maximum(largest, scores.max(-1)))
        weights, shrink = jnp.exp(scores - now[..., None]), jnp.exp(largest - now)
        total = total * shrink + weights.sum(-1)
        mixed = mixed * shrink[..., None] + jnp.einsum("bhqk,bkhd->bhqd", weights, values)
        return (now, total, mixed), None

    nothing = jnp.zeros((batch, num_heads, seq))
    empty = (nothing - jnp.inf, nothing, jnp.zeros((batch, num_heads, seq, head_dim)))
    (_, total, mixed), _ = lax.scan(step, empty, (jnp.arange(0, seq, chunk), cut(k), cut(v)))
    return jnp.moveaxis(mixed / total[..., None], 1, 2)
    ### END SOLUTION


# %% [markdown]
# ## In your own words
#
# A colleague trains a model of `L` identical layers. Each layer's input takes `A` bytes, and the backward pass needs
# another `10 A` for each layer; a layer's forward pass takes time `f`, its backward pass `2 f`. She has half as much
# memory as she needs. She can split the batch into two microbatches, or recompute each layer in the backward pass. Say
# what each option costs in time and how much stays in memory, and when you would use the one, the other, or both.

# %% [markdown]
# ### BEGIN SOLUTION
# With neither, the forward pass leaves `11 A L` bytes and a step takes `3 f L`. Two microbatches leave half of the
# activations, `5.5 A L`, and add no work, but they add the running total of the gradient, which is as large as the
# parameters, and halve the rows of each product: as long as a microbatch still fills the device, that costs hardly any
# time. Remat leaves `A L` plus one layer's `10 A`, far less, and takes `4 f L`, a third more. So: microbatches first,
# since they are nearly free, as long as they stay large enough for the device. Remat when a microbatch is already
# small, or when you must save more than a small factor; a policy that keeps the outputs of matmuls recovers
# most of the time. Both where even one row at a time is too much, as with long sequences; and remat lets microbatches
# be larger again, which can pay for part of its cost.
# ### END SOLUTION

# %% [markdown]
# ## Lab: the cost of a step
#
# Now put everything together, on a Transformer with 12 layers of width 1,024, and 16 rows of 1,024 tokens. Nothing is
# computed here: each step is exported from shapes alone, and its cost predicted for one H100.

# %%
if __name__ == "__main__":
    model = transformer(width=1024, hidden=4096, num_layers=12, num_heads=16, vocab=2048, max_seq=1024)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    tokens = jax.ShapeDtypeStruct((16, 1024), jnp.int32)

    def loss_with(layers):
        """The model's loss, with its layers applied by ``layers(layer, stacked_params, x)``."""

        def loss(params, batch):
            x = model.embed(params["embed"], batch["inputs"])
            x = layers(model.layer, params["layers"], x)
            return model.loss(params["head"], x, batch["targets"])

        return loss

    def predicted(step, name):
        """Predict the cost of a step ``(params, batch) -> (loss, gradients)`` on one device."""

        def program(params, batch):
            mesh = abstract_mesh({"data": 1})
            return jax.shard_map(step, mesh=mesh, in_specs=(P(), P()), out_specs={"loss": P(), "gradients": P()})(
                params, batch
            )

        inputs = {"params": params, "batch": {"inputs": tokens, "targets": tokens}}
        specs, results = dict.fromkeys(inputs, P()), {"loss": P(), "gradients": P()}
        return predict(export(program, inputs, specs, mesh={"data": 1}, out_specs=results), "8xH100", name=name)

    def whole(layers):
        """A step on the whole batch at once."""
        return lambda params, batch: named(jax.value_and_grad(loss_with(layers))(params, batch))

    def in_four(layers):
        """A step in four microbatches."""
        return lambda params, batch: named(accumulate_gradients(loss_with(layers), params, batch, 4))

    def named(pair):
        return dict(zip(("loss", "gradients"), pair, strict=True))

    steps = {
        "scan": whole(scan_layers),
        "scan, 4 microbatches": in_four(scan_layers),
        "scan, remat": whole(remat_layers),
        "scan, remat, 4 microbatches": in_four(remat_layers),
    }
    predictions = {name: predicted(step, name) for name, step in steps.items()}
    for name, p in predictions.items():
        print(f"{name:30} peak {p.memory.peak / 2**30:6.2f} GiB   predicted {1e3 * p.timeline.seconds:6.1f} ms")

# %% [markdown]
# Remat computes more, yet is predicted to be *faster* here: whatever is kept must be written to memory and read back,
# and that takes longer than a few more products. Here is where the time goes, and what is in memory at the peak:

# %%
if __name__ == "__main__":
    first, last = "scan", "scan, remat, 4 microbatches"
    display(HTML(comparison_html("One training step", {last: predictions[last], first: predictions[first]})))

# %% [markdown]
# And it trains: `mixed_precision_loss` in four microbatches next to float32, on a small model with plain SGD. The two
# loss curves should agree except in the last digits.

# %%
if __name__ == "__main__":
    width, hidden, vocab, seq = 64, 128, 32, 32
    shapes = {"attention_norm": (width,), "qkv": (width, 3 * width), "out": (width, width), "mlp_norm": (width,)}
    shapes |= {"up": (width, hidden), "down": (hidden, width)}
    keys = iter(jax.random.split(jax.random.key(0), 20))

    def drawn(*shape):
        return jnp.ones(shape) if len(shape) == 1 else jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    layers = [{name: drawn(*shape) for name, shape in shapes.items()} for _ in range(2)]
    start = {"token": drawn(vocab, width), "position": drawn(seq, width), "layers": layers}
    start |= {"norm": drawn(width), "head": drawn(width, vocab)}

    def trained(loss_fn, params):
        """Train for eight steps and return the losses."""

        @jax.jit
        def step(params, batch):
            loss, gradients = accumulate_gradients(lambda p, b: loss_fn(p, b, 4), params, batch, 4)
            return jax.tree.map(lambda p, g: p - 0.3 * g, params, gradients), loss

        losses = []
        for i in range(8):
            params, loss = step(params, token_batch(0, i, batch=32, seq=seq, vocab=vocab))
            losses.append(float(loss))
        return losses

    both = zip(trained(mixed_precision_loss, start), trained(float32_loss, start), strict=True)
    for i, (mixed, plain) in enumerate(both):
        print(f"step {i}   mixed precision {mixed:.4f}   float32 {plain:.4f}")

# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Sequence parallelism
#
# In the chapter `tp_transformer`, activations between the split layers were in parts, but how much memory do they take?
# In this chapter you build a block whose saved activations follow a formula, remove the formula's largest term for
# almost no extra work, and then use the same axis in a different way, with no weight split at all.
#
# You will write five functions:
#
# | function | what it does |
# |---|---|
# | `enter_tensor_region` | gathers a split sequence into a whole one, with the right derivative |
# | `leave_tensor_region` | the reverse: the other half of the pair |
# | `sp_block` | a layer that saves no whole activations for its backward pass |
# | `selective_recompute` | the same without the attention scores, for about 2% more FLOPs at the graded size |
# | `ulysses_attention` | attention over a split sequence, by all-to-alls there and back |

# %%
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import print_saved_residuals
from jax.sharding import PartitionSpec as P

from course.layout import tensor_specs
from course.mesh import abstract_mesh, as_varying, make_mesh
from course.model import drop, rms_norm, split_heads, transformer
from course.predict import predict
from course.program import export
from solutions.data_parallel import fold_key_over_axes
from solutions.tp_transformer import gather_matmul, matmul_scatter, tp_transformer_block

PyTree = Any
# (qkv, num_heads) -> attention output
Attend = Callable[[jax.Array, int], jax.Array]

# %% [markdown]
# ## Into the split layers: `enter_tensor_region`
#
# The weights of a layer are split over an axis, as in `tensor_parallel`. Before the split layers, activations come in
# one of two forms:
#
# - **in parts** (`split=True`): each device has `seq/n` tokens. This is sequence parallelism.
# - **whole** (`split=False`): each device has all tokens, the same numbers everywhere, and their type says so. This is
#   tensor parallelism as in the first Megatron-LM.
#
# In both cases, a device needs all tokens inside. The values are the easy half. Take one token `x`, which each of four
# devices multiplies by its own weight, and the sum of the products:

# %%
if __name__ == "__main__":
    weights, x = np.array([1.0, 10.0, 100.0, 1000.0]), 2.0
    print("sum of w * x:", (weights * x).sum(), "  its derivative by x:", weights.sum())
    for device, weight in enumerate(weights):
        print(f"device {device} computes {weight * x:6} and knows {weight:6} of the derivative")

# %% [markdown]
# No single device knows the derivative with respect to a token. In the backward pass, each has a share of the
# gradient of **all** tokens, and what must come back has the form of `x`. If `x` is in parts, each device gets the
# complete gradient of its own tokens. If `x` is whole, every device gets the complete gradient of all tokens.
#
# JAX derives this from the collective that you choose, and from types. With `as_varying(x, axis_name)`, an array that
# is the same on every device of an axis becomes one that *varies* over it: no data moves in the forward pass, but in
# the backward pass it does.
#
# | | `split=True` | `split=False` |
# |---|---|---|
# | `x` | `[batch, seq/tensor, width]`, varying | `[batch, seq, width]`, the same on every device |
# | result | `[batch, seq, width]`, varying | the same numbers, varying |
#
# With `A` bytes in `[batch, seq, width]`, a device sends:
#
# | budget | forward | backward |
# |---|---|---|
# | `split=True` | one all-gather, `(n-1)/n A` | one reduce-scatter, `(n-1)/n A` |
# | `split=False` | nothing | one all-reduce, `2 (n-1)/n A` |
# | any other collective | none | none |


# %%
def enter_tensor_region(x: jax.Array, axis_name: str, split: bool) -> jax.Array:
    """Bring activations into split layers. Runs inside ``shard_map``.

    Args:
        x: Tokens in parts, ``[batch, seq/axis, width]``; or whole, ``[batch, seq, width]``.
        axis_name: The mesh axis that the layers are split over.
        split: Whether ``x`` is in parts.

    Returns:
        All tokens, ``[batch, seq, width]``, varying over ``axis_name``.
    """
    ### BEGIN SOLUTION
    return lax.all_gather(x, axis_name, axis=1, tiled=True) if split else as_varying(x, axis_name)
    ### END SOLUTION


# %% [markdown]
# ## Out of the split layers: `leave_tensor_region`
#
# After the split layers, the output for each token is a sum over devices, and a device has the share that its features
# contribute. Return the sum over the devices in the form that `x` came in: in parts, or whole.

# %%
if __name__ == "__main__":
    shares = np.arange(8.0).reshape(2, 4)  # two devices, four tokens
    print("device 0 has", shares[0], "and device 1", shares[1])
    print("in parts: device 0 wants", shares.sum(0)[:2], "and device 1", shares.sum(0)[2:])
    print("whole:    both want", shares.sum(0))

# %% [markdown]
# In the backward pass, a device needs the gradient of *its share*, and each share has the same derivative as the sum.
# Look at the table: forward and backward have changed places. That is why the two functions are called a conjugate
# pair. A whole result must be **typed as the same** on every device; if all devices returned it as their own, each
# would differentiate it, and all gradients that flow back through it would be `n` times too large.
#
# | | `split=True` | `split=False` |
# |---|---|---|
# | `x` | `[batch, seq, width]`, a share on each device | the same |
# | result | `[batch, seq/tensor, width]`, varying | `[batch, seq, width]`, the same on every device |
#
# | budget | forward | backward |
# |---|---|---|
# | `split=True` | one reduce-scatter, `(n-1)/n A` | one all-gather, `(n-1)/n A` |
# | `split=False` | one all-reduce, `2 (n-1)/n A` | nothing |
# | any other collective | none | none |


# %%
def leave_tensor_region(x: jax.Array, axis_name: str, split: bool) -> jax.Array:
    """Bring activations out of split layers, summed over devices. Runs inside ``shard_map``.

    Args:
        x: This device's share of the sum, for all tokens, ``[batch, seq, width]``.
        axis_name: The mesh axis that the layers are split over.
        split: Whether to return the sum in parts.

    Returns:
        The sum: this device's tokens, ``[batch, seq/axis, width]``; or all, typed as the same on every device.
    """
    ### BEGIN SOLUTION
    return lax.psum_scatter(x, axis_name, scatter_dimension=1, tiled=True) if split else lax.psum(x, axis_name)
    ### END SOLUTION


# %% [markdown]
# ## A block that saves parts: `sp_block`
#
# The layer is the one in `tp_transformer`, attention and then MLP. Attention with this device's heads is an argument:
# `attend(qkv, num_heads)` turns `[batch, seq, 3 * num_heads * head_dim]` into `[batch, seq, num_heads * head_dim]`. The
# columns of `qkv` are q of all heads, then k, then v. The function below is the plain one. The one that `check` passes
# recomputes its scores in the backward pass, so that memory shows what everything else saves. The scores are the next
# exercise.

# %%


def attend(qkv: jax.Array, num_heads: int) -> jax.Array:
    """Apply causal attention with this device's heads."""
    q, k, v = jnp.moveaxis(qkv.reshape(*qkv.shape[:-1], 3, num_heads, -1), -3, 0)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return mixed.reshape(*mixed.shape[:-2], -1)


# %% [markdown]
# What is new is the memory. A forward pass saves what the backward pass will need, and a product needs its input: the
# gathered, **whole** activations before `qkv` and `up`. Written in the obvious way, sequence parallelism splits
# everything between the layers, and then saves whole activations after all. You can list what JAX saves:

# %%
if __name__ == "__main__":

    def listed(x, kernel):
        print_saved_residuals(lambda x, kernel: jax.nn.gelu(jnp.sin(x) @ kernel).sum(), x, kernel)

    listed(jnp.ones((2, 3)), jnp.ones((3, 4)))

# %% [markdown]
# For one product and its GELU, JAX saves five arrays of the output's size where one would be enough: everything else
# can be recomputed from the product's result, without any product. Korthikanti et al. count what a layer saves if
# nothing is saved twice. Their formula for this layer in float32, with `b` sequences of `s` tokens, width `h`, a hidden
# width of `4 h` and `a` heads, on `n` devices:
#
# ```text
# inputs of the 2 norms and of the 2 products after them, q, k, v,
#     attention output, hidden features before and after GELU          16 x 4 bytes x s b h / n
# masks of 2 dropouts                                                   2 x 1 byte  x s b h / n
# scores: what attention saves                                          2 x 4 bytes x a s^2 b / n
# ```
#
# `jax.checkpoint(f)` saves the arguments of `f` instead of what it computes inside, and runs `f` again in the backward
# pass. A product at the end of `f` is then not run again, since the backward pass does not need its result, but a
# collective before it is. So with the right checkpoints, a layer saves *less* than the formula, and repeats only norms,
# a GELU and gathers.
#
# - `x` and the result are in parts. **Dropout** is as in `tp_transformer`: this device's key is
#   `fold_in(key, its index along the axis)`, split in two; the first half is for what attention adds, the second for
#   what the MLP adds. `drop(x, rate, key)` and `rms_norm(params, x)` come from `course.model`, and
#   `fold_key_over_axes(key, (axis_name,))`, from `data_parallel`, folds in the index.
# - Whole leaves (the norms' scales, the bias of `down`) enter typed as **the same** on every device of `axis_name`.
#   Then their gradients come out complete and the same everywhere: JAX adds up the shares.
# - `q`, `k` and `v` come from one gather.
#
# | | |
# |---|---|
# | `x` and the result | `[batch, seq/tensor, width]`, a different part of the sequence on each device |
# | split leaves | `qkv` with `kernel` `[width, 3, num_heads/tensor, head_dim]` |
# | | `out` with `kernel` `[num_heads/tensor, head_dim, width]` |
# | | `up` with `kernel` `[width, hidden/tensor]` and `bias` `[hidden/tensor]` |
# | | `down` with `kernel` `[hidden/tensor, width]` |
# | whole leaves | the `bias` of `down`, and the `scale` of each norm, all `[width]` |
#
# With `A` bytes of activations `[batch, seq, width]`, a layer may send:
#
# | budget | forward | backward |
# |---|---|---|
# | all-gathers, each of `(n-1)/n A` | 2 | 2, or 4 if it gathers again |
# | reduce-scatters, each of `(n-1)/n A` | 2 | 2 |
# | all-reduce | none | of the whole leaves' gradients, once |
# | any other collective | none | none |
# | live temporaries of 12 layers | | at most the formula's bytes for 15 layers without scores, plus the scores of 2 |
# | FLOPs of matmuls | | at most 1.05 times those without recomputation |
#
# The three extra layers, and the scores of two, leave room for what one layer's backward pass needs. Useful:
# `jax.checkpoint`.


# %%
def sp_block(params: PyTree, x: jax.Array, key: jax.Array, rate: float, attend: Attend, axis_name: str) -> jax.Array:
    """Apply one layer of a Transformer, saving activations in parts. Runs inside ``shard_map``.

    Args:
        params: ``{"attention_norm": ..., "attention": {"qkv": ..., "out": ...}, "mlp": {"norm": ..., "up": ...,
            "down": ...}}``: this device's part of split leaves; whole leaves, typed as the same on every device.
        x: This device's part of each sequence, ``[batch, seq/axis, width]``.
        key: For dropout, the same on every device of ``axis_name``.
        rate: Dropout rate of what is added to the residual, a Python number; 0 drops nothing.
        attend: Causal attention, from ``(qkv, num_heads)`` to attention output.
        axis_name: The mesh axis that features and sequences are split over.

    Returns:
        This device's part of each sequence, like ``x``.
    """
    ### BEGIN SOLUTION
    attention, mlp = params["attention"], params["mlp"]
    width, _, num_heads, _ = attention["qkv"]["kernel"].shape
    first, second = jax.random.split(fold_key_over_axes(key, (axis_name,)))

    @jax.checkpoint
    def into(norm, kernel, x):
        return enter_tensor_region(rms_norm(norm, x), axis_name, True) @ kernel

    @jax.checkpoint
    def back(hidden, kernel):
        return leave_tensor_region(jax.nn.gelu(hidden) @ kernel, axis_name, True)

    qkv = into(params["attention_norm"], attention["qkv"]["kernel"].reshape(width, -1), x)
    y = leave_tensor_region(attend(qkv, num_heads) @ attention["out"]["kernel"].reshape(-1, width), axis_name, True)
    x = x + drop(y, rate, first)
    hidden = into(mlp["norm"], mlp["up"]["kernel"], x) + mlp["up"]["bias"]
    return x + drop(back(hidden, mlp["down"]["kernel"]) + mlp["down"]["bias"], rate, second)
    ### END SOLUTION


# %% [markdown]
# ## Only the scores: `selective_recompute`
#
# What share of a layer's memory and FLOPs do the scores take? For 16 heads of 128 features, and the ten arrays per
# token that `sp_block` saves besides the scores:

# %%
if __name__ == "__main__":
    for tokens in (512, 1024, 4096, 16384):
        scores, rest, head_dim = 2 * tokens, 10 * 128, 128
        again, layer = 2 * tokens, 3 * (24 * 16 * head_dim + 4 * tokens)  # for 16 heads
        print(f"{tokens:6} tokens: scores {scores / (scores + rest):4.0%} of what is saved, ", end="")
        print(f"{again / layer:4.1%} of the FLOPs to compute them again")

# %% [markdown]
# The longer the sequence, the larger the share of the scores. Scores are also cheap to recompute: one product of
# queries and keys, and a softmax. So recompute them, and nothing else that contains a product.
#
# In all other respects this function is `sp_block`: the same values, gradients and collectives. `attend` is not an
# argument here; use the one above.
#
# | budget | |
# |---|---|
# | collectives | those of `sp_block` |
# | live temporaries of 12 layers | at most the formula's bytes for 15 layers without scores, plus the scores of 2 |
# | FLOPs of matmuls | at most 1.05 times those without recomputation |


# %%
def selective_recompute(params: PyTree, x: jax.Array, key: jax.Array, rate: float, axis_name: str) -> jax.Array:
    """Apply the layer of ``sp_block``, recomputing attention scores. Runs inside ``shard_map``.

    Args:
        params: As for ``sp_block``.
        x: This device's part of each sequence, ``[batch, seq/axis, width]``.
        key: For dropout, the same on every device of ``axis_name``.
        rate: Dropout rate of what is added to the residual, a Python number.
        axis_name: The mesh axis that features and sequences are split over.

    Returns:
        This device's part of each sequence, like ``x``.
    """
    ### BEGIN SOLUTION
    return sp_block(params, x, key, rate, jax.checkpoint(attend, static_argnums=1), axis_name)
    ### END SOLUTION


# %% [markdown]
# ## Another way to use the axis: `ulysses_attention`
#
# DeepSpeed-Ulysses leaves the weights whole and splits only tokens. Norms, MLPs and projections then need no
# communication at all. Attention does, since every query attends to all earlier keys. But heads do not look at each
# other. So for attention alone, the axis changes its meaning: from tokens in parts to heads in parts, and back.

# %%
if __name__ == "__main__":
    names = np.array([[f"t{token}h{head}" for head in range(4)] for token in range(4)])
    for device in range(2):
        print(f"device {device} has   ", *names[2 * device : 2 * device + 2].ravel())
        print("         and needs", *names[:, 2 * device : 2 * device + 2].ravel())

# %% [markdown]
# Half of what a device has stays; the other half goes to the device that has those heads. With `n` devices, each sends
# `(n-1)/n` of its part, `(n-1)/n^2` of the whole array: the larger the axis, the less.
#
# - `q` is `[batch, seq/n, num_heads, head_dim]`, `k` and `v` are `[batch, seq/n, kv_heads, head_dim]`. Query head `i`
#   uses KV head `i // (num_heads // kv_heads)`: grouped-query attention. `n` divides `num_heads`.
# - If `n` divides `kv_heads`, each device attends with `kv_heads/n` of them. If there are **fewer KV heads than
#   devices**, then `kv_heads` divides `n`, and a KV head goes to all devices whose queries use it. No other cases
#   occur.
# - Attention is causal over the whole sequence, and scores are divided by `sqrt(head_dim)`. Use `attend_in_chunks`:
#   `jax.nn.dot_product_attention` of whole sequences has an array with an element for each pair of tokens.
#
# With `B` bytes of whole queries, `[batch, seq, num_heads, head_dim]`:
#
# | budget | forward | backward |
# |---|---|---|
# | all-to-all of queries and results | `2 (n-1)/n^2 B` | as much again |
# | all-to-all of keys and values | the same, times `max(kv_heads, n)/num_heads` | as much |
# | any other collective | none | none |
# | largest temporary | at most a quarter of all scores of this device's heads | |
#
# Useful: `lax.all_to_all(..., tiled=True)`, `jnp.repeat`. Without `tiled=True`, taking the gradient of an all-to-all
# raises an error in this version of JAX when `split_axis` and `concat_axis` differ.


# %%
def attend_in_chunks(q: jax.Array, k: jax.Array, v: jax.Array, chunk: int) -> jax.Array:
    """Apply causal attention to whole sequences, ``chunk`` queries at a time, recomputing scores.

    ``q`` is ``[batch, seq, num_heads, head_dim]``; ``k`` and ``v`` may have fewer heads, a divisor of ``num_heads``.
    """
    seq = q.shape[1]

    @jax.checkpoint
    def some(start):
        rows = lax.dynamic_slice_in_dim(q, start, chunk, 1)
        seen = jnp.arange(seq) <= start + jnp.arange(chunk)[:, None]
        return jax.nn.dot_product_attention(rows, k, v, mask=seen[None, None])

    return jnp.moveaxis(lax.map(some, jnp.arange(0, seq, chunk)), 0, 1).reshape(q.shape)


# %%
def ulysses_attention(q: jax.Array, k: jax.Array, v: jax.Array, chunk: int, axis_name: str) -> jax.Array:
    """Apply causal attention to split sequences, splitting heads in between. Runs inside ``shard_map``.

    Args:
        q: Queries of this device's tokens, ``[batch, seq/axis, num_heads, head_dim]``.
        k: Keys of these tokens, ``[batch, seq/axis, kv_heads, head_dim]``.
        v: Values, of the same shape.
        chunk: Number of queries to process at once; divides ``seq``.
        axis_name: The mesh axis that sequences are split over.

    Returns:
        The output of attention for this device's tokens, like ``q``.
    """
    ### BEGIN SOLUTION
    copies = max(1, lax.axis_size(axis_name) // k.shape[2])

    def to_heads(x):
        return lax.all_to_all(x, axis_name, split_axis=2, concat_axis=1, tiled=True)

    k, v = (to_heads(jnp.repeat(x, copies, axis=2)) for x in (k, v))
    mixed = attend_in_chunks(to_heads(q), k, v, chunk)
    return lax.all_to_all(mixed, axis_name, split_axis=1, concat_axis=2, tiled=True)
    ### END SOLUTION


# %% [markdown]
# ## In your own words
#
# A colleague looks at sequence parallelism and says: "Plain tensor parallelism has two all-reduces in a forward pass;
# this has two all-gathers and two reduce-scatters. That is twice the communication, to save a few norms." What is true
# of that? Say what is sent in either case, and which part of `34 + 5 a s / h` (the paper's formula for 16-bit numbers,
# in bytes per `s b h`; see the chapter's page) stays whole on every device without sequence parallelism. For `n = 8`,
# what share of everything saved is that, if the scores are recomputed?

# %% [markdown]
# ### BEGIN SOLUTION
# An all-reduce sends `2 (n-1)/n A`, an all-gather or a reduce-scatter half of that. So two all-reduces send as many
# bytes as two all-gathers and two reduce-scatters; only a block that gathers again in the backward pass sends more, 10
# transfers of `(n-1)/n A` instead of 8. Of the 34, 10 stay whole: inputs of the two norms (4), of the two products
# after them (4), two masks (2). The other 24 are split. On eight devices a plain layer saves `10 + 24/8 = 13` times
# `s b h`, of which 10, or 77%, are whole; with sequence parallelism `34/8 = 4.25`. So the "few norms" are three
# quarters of what is saved.
# ### END SOLUTION

# %% [markdown]
# ## Lab: eight layers, three ways
#
# Here are your two blocks in stacks of eight layers on 8 H100s, forward and backward, next to `tp_transformer_block`
# from the chapter `tp_transformer`, which leaves all saving to JAX. Nothing is computed; it takes about 10 seconds.
# Find the formula's terms in the figures: a layer's `4 s b h / n` bytes are 8 MiB here.

# %%
if __name__ == "__main__":
    model = transformer(width=2048, hidden=8192, num_layers=8, num_heads=16, vocab=8, max_seq=8)

    def init():
        layers = model.init(jax.random.key(0))["layers"]
        return {"layers": {**layers, "attention": split_heads(layers["attention"], 16)}}

    shapes = jax.eval_shape(init)
    specs, part = tensor_specs(shapes, "tensor"), P(None, "tensor")

    def stack(block):
        def local(params, x, upstream):
            def run(params, x):
                def layer(x, numbered):
                    return block(numbered[1], x, jax.random.fold_in(jax.random.key(0), numbered[0])), None

                return lax.scan(layer, x, (jnp.arange(8), params["layers"]))[0]

            values, pull = jax.vjp(run, params, x)
            of_params, of_x = pull(upstream)
            return {"values": values, "params": of_params, "x": of_x}

        outs = {"values": part, "params": specs, "x": part}
        mapped = jax.shard_map(local, mesh=abstract_mesh({"tensor": 8}), in_specs=(specs, part, part), out_specs=outs)
        x = jax.ShapeDtypeStruct((8, 1024, 2048), "float32")
        inputs, ins = {"params": shapes, "x": x, "upstream": x}, {"params": specs, "x": part, "upstream": part}
        step = export(lambda **given: mapped(*given.values()), inputs, ins, mesh={"tensor": 8}, out_specs=outs)
        return predict(step, "8xH100")

    both = gather_matmul, matmul_scatter
    stacks = {
        "as JAX saves it": lambda params, x, key: tp_transformer_block(params, x, key, 0.1, *both, "tensor"),
        "sp_block": lambda params, x, key: sp_block(params, x, key, 0.1, attend, "tensor"),
        "selective_recompute": lambda params, x, key: selective_recompute(params, x, key, 0.1, "tensor"),
    }
    for name, block in stacks.items():
        prediction = stack(block)
        resident, seconds = prediction.memory.temporaries / 2**20, prediction.timeline.seconds
        print(f"{name:24} {resident:6.0f} MiB live at once, {1e3 * seconds:.1f} ms predicted")

# %% [markdown]
# ## Lab: few KV heads
#
# Attention with eight query heads over four devices, compared with the same on one device. With two KV heads, each of
# them travels to two devices; with one, it travels to all four.

# %%
if __name__ == "__main__":
    keys = jax.random.split(jax.random.key(0), 3)
    part = P(None, "tensor")
    for kv_heads in (8, 2, 1):
        shapes = [(2, 32, heads, 16) for heads in (8, kv_heads, kv_heads)]
        q, k, v = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
        mapped = jax.shard_map(
            lambda q, k, v: ulysses_attention(q, k, v, 8, "tensor"),
            mesh=make_mesh({"tensor": 4}),
            in_specs=(part, part, part),
            out_specs=part,
        )
        result = jax.jit(mapped)(q, k, v)
        error = jnp.max(jnp.abs(result - jax.nn.dot_product_attention(q, k, v, is_causal=True)))
        print(f"{kv_heads} KV heads: largest difference {error:.1e}")

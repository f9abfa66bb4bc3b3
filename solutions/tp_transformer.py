# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # A tensor-parallel Transformer
#
# You have dense layers whose features are split over an axis, and rings that send while they multiply. In this chapter
# you build a whole Transformer from them, over `data` x `tensor`: blocks, embedding, loss, and a training step that
# makes exactly the same update as a single device.
#
# You will write five functions:
#
# | function | what it does |
# |---|---|
# | `tp_transformer_block` | one layer: attention, then MLP |
# | `parallel_transformer_block` | one layer: attention and MLP in parallel, with half the communication |
# | `vocab_parallel_embed` | token and position embeddings, with the token table split over the vocabulary |
# | `vocab_parallel_loss` | cross-entropy, with the logits split over the vocabulary |
# | `tp_transformer_step` | the whole step, with rings, and with gradients at the right scale |

# %%
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from course.data import token_batch
from course.layout import tensor_specs
from course.machines import machine
from course.mesh import abstract_mesh, as_varying, make_mesh
from course.model import drop, full_loss, rms_norm, split_heads, transformer
from course.predict import predict
from course.program import export
from solutions.async_tensor_parallel import matmul_ring_scatter, ring_gather_matmul
from solutions.data_parallel import fold_key_over_axes
from solutions.tensor_parallel import column_parallel_dense, row_parallel_dense

PyTree = Any
# (x, kernel, axis_name) -> product
Matmul = Callable[[jax.Array, jax.Array, str], jax.Array]

# %% [markdown]
# ## Two interchangeable communication functions
#
# Between blocks, a device holds its part of each sequence, `[batch, seq/tensor, width]`. Inside a block, it holds whole
# sequences and its part of the features. Two functions convert between these layouts:
#
# - `gather_matmul(x, kernel, axis_name)`: `[batch, seq/tensor, d]` times `[d, f/tensor]` is `[batch, seq, f/tensor]`.
# - `matmul_scatter(x, kernel, axis_name)`: `[batch, seq, f/tensor]` times `[f/tensor, d]` is `[batch, seq/tensor, d]`,
#   summed over the devices.
#
# A block need not know whether these are one big gather or a ring. So it **takes both as arguments**, and uses nothing
# else to communicate. Here are the versions from the chapter `tensor_parallel`; the rings have the same signature.


# %%
def gather_matmul(x: jax.Array, kernel: jax.Array, axis_name: str) -> jax.Array:
    """Gather all at once, then multiply."""
    return column_parallel_dense({"kernel": kernel}, x, axis_name)


def matmul_scatter(x: jax.Array, kernel: jax.Array, axis_name: str) -> jax.Array:
    """Multiply all at once, then sum and scatter."""
    return row_parallel_dense({"kernel": kernel}, x, axis_name)


# %%
if __name__ == "__main__":

    def there_and_back(x, into, back):
        inside = gather_matmul(x, into, "tensor")
        between = matmul_scatter(inside, back, "tensor")
        print(f"between blocks {x.shape}, inside {inside.shape}, between blocks {between.shape}")
        return between

    jax.eval_shape(
        jax.shard_map(
            there_and_back,
            mesh=abstract_mesh({"tensor": 4}),
            in_specs=(P(None, "tensor"), P(None, "tensor"), P("tensor")),
            out_specs=P(None, "tensor"),
        ),
        *(jax.ShapeDtypeStruct(shape, "float32") for shape in ((2, 24, 16), (16, 40), (40, 16))),
    )

# %% [markdown]
# Attention itself is the same as in the chapter `tensor_parallel`, and needs no communication: a device has all tokens
# of its heads. The columns of a `qkv` kernel `[width, 3, num_heads/tensor, head_dim]` are q of all heads, then k, then
# v.


# %%
def attend(qkv: jax.Array, num_heads: int) -> jax.Array:
    """Apply causal attention with this device's heads.

    Args:
        qkv: ``[batch, seq, 3 * num_heads * head_dim]``.
        num_heads: Number of this device's heads.

    Returns:
        ``[batch, seq, num_heads * head_dim]``.
    """
    q, k, v = jnp.moveaxis(qkv.reshape(*qkv.shape[:-1], 3, num_heads, -1), -3, 0)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return mixed.reshape(*mixed.shape[:-2], -1)


# %% [markdown]
# ## One layer: `tp_transformer_block`
# A layer computes the same as `course.model.TransformerLayer`:
#
# ```text
# x = x + drop(attention(norm(x)))
# x = x + drop(mlp(norm(x)))
# ```
#
# Norms, residuals and dropout work on each token separately. So they belong *between* the split layers, where a device
# has `1/n` of the tokens: no work is done twice, and nothing is stored twice. `rms_norm(params, x)` and
# `drop(x, rate, key)` come from `course.model`.
#
# **Dropout.** The parts of a sequence are on different devices, and each must draw its own mask. The key has to differ
# along one axis, and be the same along another:

# %%
if __name__ == "__main__":

    def first_elements(key):
        """Return the first elements of the mask that each device draws."""
        return jax.random.bernoulli(key, 0.5, (1, 1, 12)).astype(int)

    for name, own in (("unchanged", lambda key: key), ("folded", lambda key: fold_key_over_axes(key, ("tensor",)))):
        masks = jax.shard_map(
            lambda key, own=own: first_elements(as_varying(own(key), "tensor")),
            mesh=make_mesh({"data": 2, "tensor": 4}),
            in_specs=P(),
            out_specs=P("tensor"),
        )(jax.random.key(0))
        print(f"key {name}:", *("".join(map(str, np.asarray(mask).ravel())) for mask in masks[:, 0]))

# %% [markdown]
# `key` is this layer's, the same on every device of `axis_name`. This device's key is
# `fold_in(key, its index along the axis)`, as `fold_key_over_axes` computes it. Split *that* key in two: the first half
# for the output of attention, the second for the output of the MLP. So masks depend on the size of the axis; one device
# gets the same masks by drawing them separately for each part of the sequence, and `check` does that.
#
# | | |
# |---|---|
# | `x` and the result | `[batch, seq/tensor, width]`, a different part of the sequence on each device |
# | split leaves | `qkv` with `kernel` `[width, 3, num_heads/tensor, head_dim]` |
# | | `out` with `kernel` `[num_heads/tensor, head_dim, width]` |
# | | `up` and `down` as for `tp_mlp` |
# | whole leaves | the norms, and the bias of `down` |
#
# | budget | forward | forward and backward |
# |---|---|---|
# | all-gathers, each of `(n-1)/n` of the activations | 2 | 4 |
# | reduce-scatters, each of `(n-1)/n` of the activations | 2 | 4 |
# | any other collective | none | none |
#
# In bytes: with `A` bytes of activations `[batch, seq, width]`, a device sends `8 (n-1)/n A` per layer. `q`, `k` and
# `v` come from **one** product. In one of the test cases, the two functions passed to you communicate differently: all
# communication must go through them.
#
# Gradients of split leaves must be those of one device. For a whole leaf, every device has a share of the gradient:
# `check` adds the shares up, and so will your step.


# %%
def tp_transformer_block(
    params: PyTree,
    x: jax.Array,
    key: jax.Array,
    rate: float,
    gather_matmul: Matmul,
    matmul_scatter: Matmul,
    axis_name: str,
) -> jax.Array:
    """Apply one layer of a Transformer, attention and then MLP. Runs inside ``shard_map``.

    Args:
        params: ``{"attention_norm": ..., "attention": {"qkv": ..., "out": ...}, "mlp": {"norm": ..., "up": ...,
            "down": ...}}``, this device's part; all varying over ``axis_name``.
        x: This device's part of each sequence, ``[batch, seq/axis, width]``.
        key: For dropout, the same on every device of ``axis_name``.
        rate: Dropout rate of what is added to the residual, a Python number; 0 drops nothing.
        gather_matmul: ``[batch, seq/axis, d]`` and ``[d, f/axis]`` to ``[batch, seq, f/axis]``.
        matmul_scatter: ``[batch, seq, f/axis]`` and ``[f/axis, d]`` to ``[batch, seq/axis, d]``.
        axis_name: The mesh axis that features and sequences are split over.

    Returns:
        This device's part of each sequence, like ``x``.
    """
    ### BEGIN SOLUTION
    attention, mlp = params["attention"], params["mlp"]
    width, _, num_heads, _ = attention["qkv"]["kernel"].shape
    first, second = jax.random.split(fold_key_over_axes(key, (axis_name,)))

    y = rms_norm(params["attention_norm"], x)
    qkv = gather_matmul(y, attention["qkv"]["kernel"].reshape(width, -1), axis_name)
    y = matmul_scatter(attend(qkv, num_heads), attention["out"]["kernel"].reshape(-1, width), axis_name)
    x = x + drop(y, rate, first)

    y = rms_norm(mlp["norm"], x)
    hidden = gather_matmul(y, mlp["up"]["kernel"], axis_name) + mlp["up"]["bias"]
    y = matmul_scatter(jax.nn.gelu(hidden), mlp["down"]["kernel"], axis_name) + mlp["down"]["bias"]
    return x + drop(y, rate, second)
    ### END SOLUTION


# %% [markdown]
# ## Half the communication: `parallel_transformer_block`
#
# In that block the MLP waits for attention, and both gather normalised tokens. GPT-J and PaLM run the two in parallel:
# both start from the same norm, and the sum of their outputs is added to the residual.
#
# ```text
# y = norm(x)
# x = x + drop(attention(y) + mlp(y))
# ```
#
# This is a **different model**, with one norm fewer. Here is what it saves, for a layer of width 2,048 and 8,192 tokens
# on eight H100s:

# %%
if __name__ == "__main__":
    h100, devices, tokens, width = machine("8xH100"), 8, 8192, 2048
    products = 3 * 2 * tokens * 12 * width**2 / devices / h100.peak("f32")
    once = 4 * tokens * width * (devices - 1) / devices / h100.bandwidth_of(tuple(range(devices)))
    for name, count in (("one after the other", 8), ("in parallel", 4)):
        print(f"{name:20} {1e3 * products:.2f} ms of matmuls, {count} transfers of {1e3 * once:.2f} ms")

# %% [markdown]
# So one all-gather and one reduce-scatter are enough. On the way in, both kernels multiply the same tokens; on the way
# out, only the sum of the two products is needed.
#
# - There is one dropout mask: `drop(..., rate, key)` with `fold_in(key, this device's index along the axis)`, not
#   split any further.
# - `up` and `down` have biases, as before.
#
# | budget | forward | forward and backward |
# |---|---|---|
# | all-gathers | 1 | 2 |
# | reduce-scatters | 1 | 2 |
# | any other collective | none | none |
# | predicted time on 8 H100s | | at most 0.85 times that of the same operations one after the other |
#
# Useful: `jnp.concatenate`, `jnp.split`.


# %%
def parallel_transformer_block(
    params: PyTree,
    x: jax.Array,
    key: jax.Array,
    rate: float,
    gather_matmul: Matmul,
    matmul_scatter: Matmul,
    axis_name: str,
) -> jax.Array:
    """Apply one layer of a Transformer, attention and MLP in parallel. Runs inside ``shard_map``.

    Args:
        params: ``{"norm": ..., "attention": {"qkv": ..., "out": ...}, "up": ..., "down": ...}``, this device's part.
        x: This device's part of each sequence, ``[batch, seq/axis, width]``.
        key: For dropout, the same on every device of ``axis_name``.
        rate: Dropout rate of what is added to the residual, a Python number; 0 drops nothing.
        gather_matmul: As for ``tp_transformer_block``.
        matmul_scatter: As for ``tp_transformer_block``.
        axis_name: The mesh axis that features and sequences are split over.

    Returns:
        This device's part of each sequence, like ``x``.
    """
    ### BEGIN SOLUTION
    qkv, out = params["attention"]["qkv"]["kernel"], params["attention"]["out"]["kernel"]
    width, _, num_heads, head_dim = qkv.shape

    y = rms_norm(params["norm"], x)
    into = jnp.concatenate([qkv.reshape(width, -1), params["up"]["kernel"]], axis=1)
    heads, hidden = jnp.split(gather_matmul(y, into, axis_name), [3 * num_heads * head_dim], axis=-1)
    both = jnp.concatenate([attend(heads, num_heads), jax.nn.gelu(hidden + params["up"]["bias"])], axis=-1)
    back = jnp.concatenate([out.reshape(-1, width), params["down"]["kernel"]])
    y = matmul_scatter(both, back, axis_name) + params["down"]["bias"]
    return x + drop(y, rate, fold_key_over_axes(key, (axis_name,)))
    ### END SOLUTION


# %% [markdown]
# ## The embedding: `vocab_parallel_embed`
#
# With a vocabulary of 32,000 and width 2,048, the embedding has 66 million parameters, more than a layer. It is split
# over the vocabulary: each device has `vocab/tensor` rows of the table, the first device the first rows, and so on.
# Every device gets all tokens, but has embeddings for only some of them:

# %%
if __name__ == "__main__":
    tokens = np.array([3, 41, 12, 55, 27, 0, 14, 33])
    for place in range(4):
        first = 14 * place
        known = (f"{token:2}" if first <= token < first + 14 else " ." for token in tokens)
        print(f"device {place} has tokens {first:2} to {first + 13}:", *known)

# %% [markdown]
# The result is split along the sequence, `[batch, seq/tensor, width]`, and for each token exactly one device has the
# embedding. What should the others contribute to make a sum come out right, and which row of its part can a device
# read for a token that is not there?
#
# Position embeddings are learned; every device holds the whole table `[max_seq, width]`. `max_seq` may be larger than
# `seq`. Which positions do this device's rows have?
#
# | budget | forward | backward |
# |---|---|---|
# | reduce-scatter | one, `(n-1)/n` of the activations | none |
# | all-gather | none | one, of the same size |
# | any other collective | none | none |
#
# Useful: `lax.axis_index`, `jnp.where`, `lax.psum_scatter(..., scatter_dimension=1, tiled=True)`,
# `lax.dynamic_slice_in_dim`.


# %%
def vocab_parallel_embed(params: PyTree, tokens: jax.Array, axis_name: str) -> jax.Array:
    """Embed tokens and positions of this device's part of each sequence. Runs inside ``shard_map``.

    Args:
        params: ``{"token": [vocab/axis, width], "position": [max_seq, width]}``; the position table is whole.
        tokens: ``[batch, seq]`` integers, the same on every device of ``axis_name``.
        axis_name: The mesh axis that the vocabulary and sequences are split over.

    Returns:
        ``[batch, seq/axis, width]``.
    """
    ### BEGIN SOLUTION
    table, position = params["token"], params["position"]
    index, own = lax.axis_index(axis_name), table.shape[0]
    local = tokens - index * own
    mine = (local >= 0) & (local < own)
    rows = jnp.where(mine[..., None], table[jnp.where(mine, local, 0)], 0)
    x = lax.psum_scatter(rows, axis_name, scatter_dimension=1, tiled=True)
    return x + lax.dynamic_slice_in_dim(position, index * x.shape[1], x.shape[1])
    ### END SOLUTION


# %% [markdown]
# ## The loss: `vocab_parallel_loss`
#
# The logits are the model's largest array: 8 sequences of 1,024 tokens with 32,000 numbers each take 1 GB. Split over
# the vocabulary, each device has `[batch, seq, vocab/tensor]` of them, and no device ever needs more. The loss of a
# token is
#
# ```text
# log(sum over the vocabulary of exp(logit)) - logit of the target
# ```
#
# and both terms are sums. But `exp` of a float32 can overflow or underflow, and a loss that is right for small logits
# is wrong for large ones:

# %%
if __name__ == "__main__":
    for logit in (10.0, 120.0, -150.0):
        two = jnp.float32([logit, logit + 1])
        plain = jnp.log(jnp.sum(jnp.exp(two)))
        print(f"logits {two}: log of the sum {plain:9.4f}, jax.nn.logsumexp {jax.nn.logsumexp(two):9.4f}")

# %% [markdown]
# `logsumexp` subtracts the largest logit before the sum and adds it back afterwards. Here you need the largest over
# *all* devices: their sums have the same scale only if all subtract the same number. It does not contribute to the
# gradient: the result does not depend on the number subtracted, so `lax.stop_gradient` is right there, and `lax.pmax`
# has no gradient anyway. In some test cases one part of the vocabulary has logits 300 above another's (which parts
# depends on the token), and for some tokens all logits are below -100.
#
# - `x` comes in parts, `[batch, seq/tensor, width]`; the head is a norm (`params["norm"]`), then a product with a bias
#   (`params["out"]`, `[width, vocab/tensor]` and `[vocab/tensor]`). Use the `gather_matmul` passed to you.
# - `targets` are whole, `[batch, seq]`, the same on every device of `axis_name`.
# - Return the mean over all tokens, **the same on every device of the axis, and typed as such**: if the result is typed
#   as varying, every device differentiates its own copy. `lax.psum` returns a value that does not vary.
#
# | budget | |
# |---|---|
# | largest temporary | at most 1.5 times `batch x seq x vocab/n` elements |
# | sent, forward and backward | at most: activations once each way; three numbers per token and a loss in all-reduces |
#
# With `T` tokens, these are `2 (n-1)/n 4 T width` and `2 (n-1)/n 4 (3 T + 1)` bytes.
#
# Useful: `lax.pmax`, `lax.psum`, `jnp.take_along_axis`.


# %%
def vocab_parallel_loss(
    params: PyTree, x: jax.Array, targets: jax.Array, gather_matmul: Matmul, axis_name: str
) -> jax.Array:
    """Compute the mean cross-entropy with the vocabulary split. Runs inside ``shard_map``.

    Args:
        params: ``{"norm": {"scale": [width]}, "out": {"kernel": [width, vocab/axis], "bias": [vocab/axis]}}``.
        x: This device's part of each sequence, ``[batch, seq/axis, width]``.
        targets: ``[batch, seq]`` integers, the same on every device of ``axis_name``.
        gather_matmul: As for ``tp_transformer_block``.
        axis_name: The mesh axis that the vocabulary and sequences are split over.

    Returns:
        The mean over all tokens, a scalar, the same on every device of ``axis_name``.
    """
    ### BEGIN SOLUTION
    kernel, bias = params["out"]["kernel"], params["out"]["bias"]
    logits = gather_matmul(rms_norm(params["norm"], x), kernel, axis_name) + bias
    highest = lax.pmax(lax.stop_gradient(jnp.max(logits, axis=-1)), axis_name)
    total = lax.psum(jnp.sum(jnp.exp(logits - highest[..., None]), axis=-1), axis_name)

    local = targets - lax.axis_index(axis_name) * bias.size
    mine = (local >= 0) & (local < bias.size)
    own_logits = jnp.take_along_axis(logits, jnp.where(mine, local, 0)[..., None], axis=-1)[..., 0]
    right = lax.psum(jnp.where(mine, own_logits, 0), axis_name)
    return jnp.mean(jnp.log(total) + highest - right)
    ### END SOLUTION


# %% [markdown]
# ## The whole step: `tp_transformer_step`
#
# Along `data_axis`, devices have different sequences and copies of all parameters. Along `tensor_axis`, they share one
# model. Now every gradient must come out at the scale of a single device, and this is where published code often goes
# wrong. Take the smallest model that has both kinds of leaf: `y = sum(a * x) + b`, with the four elements of `a` split
# over four devices, and a copy of `b` on each, a quarter of which is added to the device's partial sum. The loss is `y`
# after a `psum`, so it is the same everywhere, and typed as such:

# %%
if __name__ == "__main__":

    def parts(a, b, x):
        def loss(a, b):
            mine = jnp.sum(a * x) + b / lax.axis_size("tensor")
            return lax.psum(mine, "tensor")

        return jax.tree.map(lambda g: g.reshape(1), jax.grad(loss, argnums=(0, 1))(a, as_varying(b, "tensor")))

    of_a, of_b = jax.shard_map(
        parts, mesh=make_mesh({"tensor": 4}), in_specs=(P("tensor"), P(), P("tensor")), out_specs=P("tensor")
    )(jnp.ones(4), jnp.float32(1), jnp.arange(1.0, 5.0))
    print("on one device: dy/da = [1. 2. 3. 4.], dy/db = 1")
    print("on four:       dy/da =", of_a, "  dy/db of each device =", of_b)

# %% [markdown]
# The gradient of a split leaf is complete on the device that has it. The gradient of a whole leaf comes in shares. (In
# `tp_train_step` of the chapter `tensor_parallel` it is different: each device returns the mean of its *own* rows, four
# losses are differentiated, and split leaves come out four times too large. The rule follows from how the loss is
# typed, not from how leaves are split.)
#
# - On entry, every leaf of `params` varies over both axes; leaves under `layers` are stacked, `[num_layers, ...]`. A
#   leaf's `PartitionSpec` in `specs` names `tensor_axis` if it is split: `tensor_axis in spec`.
# - `parallel` says which of the two blocks to use.
# - **Rings**: pass `ring_gather_matmul` and `matmul_ring_scatter` to the blocks and the loss.
# - **Keys**: `key` is the same on every device. Index `i` along `data_axis` uses `fold_in(key, i)`, and layer `l` there
#   uses `fold_in(that, l)`.
# - Update by plain SGD, `leaf - learning_rate * gradient`. The returned loss is the mean over all sequences, the same
#   everywhere.
#
# | budget | |
# |---|---|
# | exposed communication, 8 H100s | at most 0.4 times that of a step with single collectives |
# | predicted time | at most that step's, minus 0.15 times its exposed time; hiding behind extra work does not count |
# | largest temporary | at most half of all logits |
# | activations sent | at most 1.5 times the collectives of all layers, embedding and loss, forward and backward |
# | all-reduce | whole leaves once over `tensor_axis`, every leaf once over `data_axis`, and the sums of the loss |
#
# `check` compares parameters after one step and after three, on meshes from 1 x 1 to 8 x 1 and 1 x 8. It also compares
# the update divided by `learning_rate`, which is your gradient, leaf by leaf: no optimizer hides its scale.
#
# Useful: `lax.scan` over the stacked layers and their indices, `jax.value_and_grad`,
# `jax.tree.map(..., gradients, specs)`.


# %%
def tp_transformer_step(
    params: PyTree,
    specs: PyTree,
    batch: dict[str, jax.Array],
    key: jax.Array,
    rate: float,
    parallel: bool,
    data_axis: str,
    tensor_axis: str,
    learning_rate: jax.Array,
) -> tuple[PyTree, jax.Array]:
    """Take one step of SGD with a Transformer on ``data`` x ``tensor``. Runs inside ``shard_map``.

    Args:
        params: ``embed``, ``layers`` and ``head``: this device's part of each leaf, all varying over both axes.
        specs: The ``PartitionSpec`` of each leaf, which names ``tensor_axis`` where it is split.
        batch: This device's sequences, ``inputs`` and ``targets``, ``[batch/data, seq]``, the same along
            ``tensor_axis``.
        key: For dropout, the same on every device.
        rate: Share of elements that are dropped, a Python number.
        parallel: Whether to use ``parallel_transformer_block``.
        data_axis: The mesh axis along which the batch is split.
        tensor_axis: The mesh axis along which features, sequences and vocabulary are split.
        learning_rate: A scalar.

    Returns:
        ``(params, loss)``: the updated parameters, and the mean loss over all sequences, the same on every device.
    """
    ### BEGIN SOLUTION
    block = parallel_transformer_block if parallel else tp_transformer_block
    key = fold_key_over_axes(key, (data_axis,))

    def layer(x, numbered):
        number, weights = numbered
        own = jax.random.fold_in(key, number)
        return block(weights, x, own, rate, ring_gather_matmul, matmul_ring_scatter, tensor_axis), None

    def loss_of(params):
        x = vocab_parallel_embed(params["embed"], batch["inputs"], tensor_axis)
        num_layers = len(jax.tree.leaves(params["layers"])[0])
        x, _ = lax.scan(layer, x, (jnp.arange(num_layers), params["layers"]))
        return vocab_parallel_loss(params["head"], x, batch["targets"], ring_gather_matmul, tensor_axis)

    def whole(gradient, spec):
        shares = gradient if tensor_axis in spec else lax.psum(gradient, tensor_axis)
        return lax.pmean(shares, data_axis)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    gradients = jax.tree.map(whole, gradients, specs)
    updated = jax.tree.map(lambda leaf, gradient: leaf - learning_rate * gradient, params, gradients)
    return updated, lax.pmean(loss, data_axis)
    ### END SOLUTION


# %% [markdown]
# ## In your own words
#
# A model of width 2,048 trains on eight devices of one node, with the mesh `data=8 x tensor=1`. A colleague proposes
# `data=1 x tensor=8`: "The batch stays the same, each device then holds an eighth of the weights, and there is no
# gradient to all-reduce any more." Say what is sent instead, for `L` layers of width `d` and `T` tokens in the whole
# batch, and what determines whether rings can hide it. Two formulas are enough.

# %% [markdown]
# ### BEGIN SOLUTION
# The gradients of `12 d^2 L` weights no longer travel: `2 (n-1)/n` of them, `24 (n-1)/n d^2 L` numbers per device.
# Instead activations do: 4 all-gathers and 4 reduce-scatters per layer, forward and backward, `8 (n-1)/n T d L`
# numbers. That is less only if `T < 3 d`, about 6,000 tokens, and a batch has many more. A ring can hide these
# transfers behind the matmuls of a layer, which take `72 T d^2 / n` FLOPs on a device. Divided by the numbers sent,
# that is `9 d / (n-1)` FLOPs for each: the number of tokens cancels, and only the width per device matters. At
# `d = 2048` and `n = 8` it is 2,600 FLOPs per 4 bytes, less than an H100 executes in the time it takes to send them
# (490 TFLOP/s at 450 GB/s: about 4,400). So at this width part of the communication stays exposed, whatever the batch
# size. Parallel blocks send half as much.
# ### END SOLUTION

# %% [markdown]
# ## Lab: the same losses everywhere
#
# Here a small Transformer trains on one device, with the course's own `full_loss`, and on three meshes with your step:
# sequential blocks in the upper half, parallel blocks in the lower one. The losses must agree to all digits shown.
# Compiling the five programs takes up to a minute on two cores.

# %%
if __name__ == "__main__":
    batches = [token_batch(0, i, batch=16, seq=16, vocab=64) for i in range(4)]
    stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *batches)

    def model_and_params(parallel):
        model = transformer(width=32, hidden=64, num_layers=2, num_heads=8, vocab=64, max_seq=16, parallel=parallel)
        params = jax.jit(model.init)(jax.random.key(0))
        return model, params

    def train(params, mesh, parallel):
        layers = {**params["layers"], "attention": split_heads(params["layers"]["attention"], 8)}
        params = {**params, "layers": layers}
        specs = tensor_specs(params, "tensor")

        def local(params, batches):
            def one(params, numbered):
                number, batch = numbered
                key = jax.random.fold_in(jax.random.key(1), number)
                return tp_transformer_step(params, specs, batch, key, 0.0, parallel, "data", "tensor", jnp.float32(0.5))

            for axis in ("data", "tensor"):
                params = jax.tree.map(lambda leaf, axis=axis: as_varying(leaf, axis), params)
            return lax.scan(one, params, (jnp.arange(4), batches))[1]

        mapped = jax.shard_map(local, mesh=mesh, in_specs=(specs, P(None, "data")), out_specs=P())
        return jax.jit(mapped)(params, stacked)

    for parallel in (False, True):
        model, params = model_and_params(parallel)
        plain_gradient = jax.jit(jax.value_and_grad(lambda params, batch, model=model: full_loss(model, params, batch)))
        meshes = [(4, 2)] if parallel else [(1, 8), (2, 4)]
        runs = {f"{d} x {t}": train(params, make_mesh({"data": d, "tensor": t}), parallel) for d, t in meshes}
        print("in parallel" if parallel else "one after the other")
        print("step   one device", *(f"{name:>15}" for name in runs))
        for i, batch in enumerate(batches):
            loss, gradient = plain_gradient(params, batch)
            params = jax.tree.map(lambda leaf, g: leaf - 0.5 * g, params, gradient)
            print(f"{i:4}   {loss:10.5f}", *(f"{losses[i]:15.5f}" for losses in runs.values()))

# %% [markdown]
# ## Lab: where the time goes
#
# Finally, your step with two layers of width 4,096 on eight H100s, with either kind of layer. Nothing is computed: the
# program is exported and simulated. Compare the exposed time with the bytes, and look in the picture for the
# communication that is still exposed: which transfers are not in a layer?

# %%
if __name__ == "__main__":

    def predicted(parallel):
        """Predict the step on eight H100s."""
        model = transformer(
            width=4096, hidden=16384, num_layers=2, num_heads=32, vocab=32000, max_seq=1024, parallel=parallel
        )

        def init():
            params = model.init(jax.random.key(0))
            params["layers"]["attention"] = split_heads(params["layers"]["attention"], 32)
            return params

        shapes, mesh = jax.eval_shape(init), {"data": 1, "tensor": 8}
        specs = tensor_specs(shapes, "tensor")

        def local(params, batch):
            for axis in mesh:
                params = jax.tree.map(lambda leaf, axis=axis: as_varying(leaf, axis), params)
            key, rate = jax.random.key(0), jnp.float32(0.01)
            updated, loss = tp_transformer_step(params, specs, batch, key, 0.0, parallel, "data", "tensor", rate)
            return {"params": jax.tree.map(lambda leaf: leaf[None], updated), "loss": loss}

        # Every device returns its own copy: a leaf's type still says "varying".
        results = {"params": P(("data", "tensor")), "loss": P()}
        mapped = jax.shard_map(local, mesh=abstract_mesh(mesh), in_specs=(specs, P("data")), out_specs=results)
        tokens = jax.ShapeDtypeStruct((4, 1024), np.int32)
        step = export(
            lambda params, batch: mapped(params, batch),
            {"params": shapes, "batch": {"inputs": tokens, "targets": tokens}},
            {"params": specs, "batch": P("data")},
            mesh=mesh,
            out_specs=results,
        )
        return predict(step, "8xH100")

    predictions = {"one after the other": predicted(False), "in parallel": predicted(True)}
    for name, prediction in predictions.items():
        print(name)
        for figure, value in prediction.figures().items():
            print(f"    {figure:24} {value}")
    predictions["in parallel"]

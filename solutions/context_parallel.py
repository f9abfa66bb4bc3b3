# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Context parallelism
#
# A sequence of 128,000 tokens does not fit on one device: not its activations, and not the keys and values that every
# token attends to. Context parallelism splits the sequence over a mesh axis, `context`. Norms, MLPs and the loss work
# on each token separately, so nothing changes for them. Attention is different, because a query needs the keys and
# values of all tokens before it, and most of these are on other devices. No device should ever have to hold all of them
# at once.
#
# So the keys and values travel: each device computes attention to the block that it has, while that block is already on
# its way to the next device. You will write four functions:
#
# | function | what it does |
# |---|---|
# | `merge_attention` | combines attention over two sets of keys |
# | `ring_attention` | passes keys and values around a ring, and their gradients after them |
# | `zigzag_order` | decides which tokens each device gets, so that all have the same amount of work |
# | `cp_transformer_step` | one training step of a Transformer on `data` x `context` |

# %%
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from course.attention import attend_chunks, attend_chunks_backward
from course.data import token_batch
from course.machines import machine
from course.mesh import abstract_mesh, as_varying, make_mesh, vary_alike
from course.model import Model, drop, full_loss, rms_norm, split_heads, split_key, transformer
from course.predict import predict
from course.program import export
from solutions.data_parallel import fold_key_over_axes

PyTree = Any
Order = tuple[tuple[int, ...], ...]

# %% [markdown]
# ## Two results into one: `merge_attention`
#
# Attention to a set of keys is a weighted mean of their values. To combine the means over two sets, you must know how
# much weight each set had in total: the sum of the exponentials of its scores. That sum overflows easily, so we keep
# its logarithm, the **log-sum-exp**, `lse`. A pair `(out, lse)` is all you need to know about attention to a set of
# keys.
#
# Here are two sets of keys, for one query and with values of a single number:

# %%
if __name__ == "__main__":
    scores, values = jnp.array([1.0, 3.0, 2.0, 0.5]), jnp.array([10.0, 20.0, 30.0, 40.0])
    for name, part in (("first two keys", slice(0, 2)), ("last two keys", slice(2, 4)), ("all four", slice(0, 4))):
        out = jnp.sum(jax.nn.softmax(scores[part]) * values[part])
        print(f"{name:15} out {out:.4f}, lse {jax.nn.logsumexp(scores[part]):.4f}")

# %% [markdown]
# A query may see none of the keys of a set, because they all come later. Then `out` is 0 and `lse` is minus infinity.
# Merging must leave the other result unchanged, and if neither set has a key that the query sees, the result is again 0
# and minus infinity. The gradient of such a query is 0, never NaN.
#
# | budget | |
# |---|---|
# | log-sum-exps | any value from -10,000 to 10,000, and minus infinity |
# | values and gradients | within 2e-5 of the largest element |
#
# Near 10,000, float32 has steps of 0.001. Two log-sum-exps can be subtracted exactly there, but the logarithm of a sum
# of exponentials is rounded to such a step.
#
# Useful: `jnp.maximum`, `jnp.where`. The gradient of `jnp.where(x > 0, f(x), 0)` is NaN wherever that of `f` is, even
# where the value of `f` is not used: replace `x` before `f` sees it.


# %%
def merge_attention(
    first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Merge attention to two sets of keys.

    Args:
        first: ``(out, lse)``: weighted means of values, ``[..., head_dim]``, and log-sum-exps of the scores, ``[...]``.
        second: The same for the other keys, with the same shapes.

    Returns:
        ``(out, lse)`` for the keys of both.
    """
    ### BEGIN SOLUTION
    (out_a, lse_a), (out_b, lse_b) = first, second
    largest = jnp.maximum(lse_a, lse_b)
    largest = jnp.where(largest == -jnp.inf, 0, largest)
    a, b = jnp.exp(lse_a - largest), jnp.exp(lse_b - largest)
    seen = a + b > 0
    total = jnp.where(seen, a + b, 1)
    out = (a[..., None] * out_a + b[..., None] * out_b) / total[..., None]
    return out, jnp.where(seen, largest + jnp.log(total), -jnp.inf)
    ### END SOLUTION


# %% [markdown]
# ## Keys and values travel: `ring_attention`
#
# A sequence is cut into equal chunks, numbered in order. `order[i]` lists the chunks on device `i`, in the order in
# which they are stored there: for three devices, for example, `((0,), (1,), (2,))`, or `((0, 1), (2, 3), (4, 5))` with
# two chunks on each. Any order is possible. A device's arrays are its chunks, one after the other.
#
# Attention between chunks is given, in `course.attention`:
#
# - `attend_chunks(q, k, v, q_chunks, k_chunks)` returns `(out, lse)` for these queries and keys. The last two arguments
#   are arrays of chunk numbers. It skips every pair of chunks in which no query sees a key.
# - `attend_chunks_backward(q, k, v, out, lse, upstream, q_chunks, k_chunks)` returns what these keys add to the
#   gradient of `q`, and what these queries add to the gradients of `k` and `v`. Its `out` and `lse` are the finished
#   ones, over *all* keys, and so is `upstream`, the gradient of the loss with respect to `out`. It recomputes the
#   weights from `lse`, so no scores have to be saved.
#
# For a ring of four devices, this shows whose keys each device has at each step, and whether it can use them in
# contiguous order:

# %%
if __name__ == "__main__":
    size = 4
    for device in range(size):
        owners = [(device - step) % size for step in range(size)]
        print(f"device {device}:", ", ".join(f"{owner} {'used' if owner <= device else 'skipped'}" for owner in owners))

# %% [markdown]
# In the **forward pass**, send the keys and values that you have to the next device, attend to them meanwhile, and
# merge. After `n - 1` transfers everyone has seen everything.
#
# In the **backward pass** the keys and values go around again. Their gradients need a contribution from every device,
# so the sums travel too, and must end on the device that the keys came from. There are two things to get right:
#
# - JAX's own derivative of the forward pass saves the keys and values of every step, which together are those of the
#   whole sequence. Write the derivative with `jax.custom_vjp`, from this device's `q`, `k`, `v`, `out` and `lse`; the
#   notebook of `fsdp` has an example at `gather_params`.
#   Compute everything else, such as this device's index along the axis, inside both passes: an array from outside
#   becomes a leaked tracer as soon as the function is wrapped in `jax.checkpoint`.
# - A sum should not wait for the computation of the same step. So send it at the beginning of a step and, at the end,
#   add your contribution to the sum that has arrived. Then each sum is one device behind its keys, and one more
#   transfer at the end brings it home.
#
# | budget | |
# |---|---|
# | bytes sent, forward | exactly `n - 1` times this device's keys and values, by `ppermute` |
# | bytes sent, forward and backward | `3 (n - 1)` to `3 n - 1` times that |
# | any other collective | none |
# | live temporaries, forward and backward | at most 1.15 times the reference's |
# | exposed communication on 8 H100s | at most 0.3 times that of gathering all keys and values |
# | predicted time of a step on 8 H100s | at most 1.2 times the reference's |
#
# Time and memory are judged for 16,384 tokens on 8 devices, in an order that gives all of them the same work (your next
# exercise). The naive baseline gathers all keys and values: at this size it is a little faster, but needs more memory.
#
# There may be fewer heads of keys and values than of queries. Any axis size works, 1 included, and the mesh may have
# other axes over which the batch is split. As in the chapter `async_tensor_parallel`, an iteration of a loop ends when
# its computations and its transfers have ended, and a loop's carry must keep its type: `vary_alike(zeros, x)[0]` is
# `zeros`, typed like `x`.
#
# Useful: `lax.ppermute`, `lax.scan`, `jnp.array(order)[lax.axis_index(axis_name)]`.


# %%
def ring_attention(q: jax.Array, k: jax.Array, v: jax.Array, order: Order, axis_name: str) -> jax.Array:
    """Apply causal attention to a sequence whose chunks are on several devices. Runs inside ``shard_map``.

    Args:
        q: Queries of this device's chunks, ``[batch, seq/axis, num_heads, head_dim]``.
        k: Keys of the same tokens, ``[batch, seq/axis, num_kv_heads, head_dim]``.
        v: Values, like ``k``.
        order: The chunk numbers of each device; all devices have the same number of chunks.
        axis_name: The mesh axis that sequences are split over, of any size.

    Returns:
        The attention of this device's queries to their own and all earlier tokens, like ``q``.
    """
    ### BEGIN SOLUTION
    size = lax.axis_size(axis_name)
    to_next = [(i, (i + 1) % size) for i in range(size)]

    def chunks_at(step):
        return jnp.array(order)[(lax.axis_index(axis_name) - step) % size]

    def send(arrays):
        return jax.tree.map(lambda x: lax.ppermute(x, axis_name, to_next), arrays)

    def forward(q, k, v):
        def add(partial_result, block, step):
            return merge_attention(partial_result, attend_chunks(q, block[0], block[1], chunks_at(0), chunks_at(step)))

        def pass_on(carry, step):
            partial_result, travelling = carry
            coming = send(travelling)
            return (add(partial_result, travelling, step), coming), None

        nothing = vary_alike(jnp.zeros_like(q), jnp.full(q.shape[:-1], -jnp.inf), q)[:2]
        (partial_result, last), _ = lax.scan(pass_on, (nothing, (k, v)), jnp.arange(size - 1))
        out, lse = add(partial_result, last, size - 1)
        return out, (q, k, v, out, lse)

    def backward(saved, upstream):
        q, k, v, out, lse = saved

        def own(block, step):
            k, v = block
            of_q, *of_kv = attend_chunks_backward(q, k, v, out, lse, upstream, chunks_at(0), chunks_at(step))
            return of_q, tuple(of_kv)

        def pass_on(carry, step):
            of_q, travelling, of_kv = carry
            coming, arriving = send(travelling), send(of_kv)
            more, own_kv = own(travelling, step)
            return (of_q + more, coming, jax.tree.map(jnp.add, arriving, own_kv)), None

        of_q, of_kv = own((k, v), 0)
        (of_q, _, of_kv), _ = lax.scan(pass_on, (of_q, send((k, v)), of_kv), jnp.arange(1, size))
        return of_q, *send(of_kv)

    attend = jax.custom_vjp(lambda q, k, v: forward(q, k, v)[0])
    attend.defvjp(forward, backward)
    return attend(*vary_alike(q, k, v))
    ### END SOLUTION


# %% [markdown]
# ## The same work for everyone: `zigzag_order`
#
# With causal attention, a late chunk of queries attends to more keys than an early one. In a ring, all devices wait in
# every step for the one with the most work, and contiguous order is the worst. This is the number of pairs of chunks
# that each of four devices computes, with two chunks on each:

# %%
if __name__ == "__main__":
    contiguous = tuple((2 * device, 2 * device + 1) for device in range(4))
    for device, chunks in enumerate(contiguous):
        work = sum(chunk + 1 for chunk in chunks)
        print(f"device {device} has chunks {chunks}, and computes {work} of {sum(range(1, 9))} pairs")

# %% [markdown]
# So cut the sequence into `2 n` chunks for `n` devices and give two of them to each device, such that every device
# computes the same number of pairs.
#
# | budget | |
# |---|---|
# | chunks | each of the `2 n` on exactly one device |
# | FLOPs of the device with the most work | at most 1.05 times the mean |
# | predicted time on 8 H100s | at most 0.65 times the contiguous order's |
#
# `check` uses your order in a program that multiplies queries, keys and values of each pair of chunks that is not
# masked, and counts what the busiest device computes.


# %%
def zigzag_order(num_devices: int) -> Order:
    """Assign chunks to devices so that causal attention is the same work on all of them.

    Args:
        num_devices: Number of devices, at least 1; the sequence has twice as many chunks.

    Returns:
        For each device a pair of chunk numbers, from 0 to ``2 * num_devices - 1``.
    """
    ### BEGIN SOLUTION
    return tuple((device, 2 * num_devices - 1 - device) for device in range(num_devices))
    ### END SOLUTION


# %% [markdown]
# ## The whole step: `cp_transformer_step`
#
# Now the rest of the model. One layer is given, with attention as an argument. `keys` is two arrays of dropout keys,
# each with one key for each of a device's chunks, and `drop` applies each key to its part of the sequence.


# %%
def layer_with(
    attend: Callable[..., jax.Array], params: PyTree, x: jax.Array, keys: tuple[jax.Array, jax.Array], rate: float
) -> jax.Array:
    """Apply one Transformer layer; ``attend(q, k, v)`` works on ``[batch, seq, num_heads, head_dim]``."""
    attention, mlp = params["attention"], params["mlp"]
    width = x.shape[-1]
    qkv = jnp.einsum("bsw,wthd->tbshd", rms_norm(params["attention_norm"], x), attention["qkv"]["kernel"])
    mixed = attend(*qkv)
    x = x + drop(mixed.reshape(x.shape) @ attention["out"]["kernel"].reshape(-1, width), rate, keys[0])
    hidden = jax.nn.gelu(rms_norm(mlp["norm"], x) @ mlp["up"]["kernel"] + mlp["up"]["bias"])
    return x + drop(hidden @ mlp["down"]["kernel"] + mlp["down"]["bias"], rate, keys[1])


# %% [markdown]
# Every device holds the whole model and its part of each sequence. Three things depend on where a token is:
#
# - **Positions.** The embedding adds a learned vector for each position in the sequence: token `t` of chunk `c` is at
#   `c * length + t`. With two chunks on a device, its positions are not contiguous. `params["embed"]` has two tables,
#   `token`, `[vocab, width]`, and `position`, `[max_seq, width]`, which may be longer than a sequence. `model.embed`
#   counts positions from 0, so look up both tables yourself and add the results.
# - **Keys.** Index `i` along `data_axis` uses `fold_in(key, i)`, layer `l` there `fold_in(that, l)`, and chunk `c` in
#   that layer `fold_in(that, c)`: the chunk decides, not the device, so the result is the same in every order. For an
#   array with one key for each chunk, `split_key` returns the two arrays for `layer_with`.
# - **The mean.** `batch["mask"]` is 1 for unmasked tokens and 0 for masked ones, such as padding at the end of a
#   sequence. Devices count different numbers of tokens, some none at all. The loss is the mean over **all tokens that
#   count, on all devices**. `model.loss(params["head"], x, targets, mask)` is the mean over those of one device, or 0
#   if it has none.
#
# This is what two devices would get wrong if one counts three tokens and the other a single one:

# %%
if __name__ == "__main__":
    losses, mask = jnp.array([[1.0, 2.0, 3.0], [8.0, 0.0, 0.0]]), jnp.array([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    means = (losses * mask).sum(1) / mask.sum(1)
    print(f"mean of the means {means.mean():.2f}, mean over all tokens {(losses * mask).sum() / mask.sum():.2f}")

# %% [markdown]
# For gradients, both axes are alike: each device has a share of every leaf's gradient, and all shares are added. Keys
# and values that travel do not change that, because the derivative of `ring_attention` has brought home what belongs to
# their tokens.
#
# Sequences are long, so a layer's activations should not be kept for the backward pass: keep each layer's input, and
# compute the layer again. Its attention then goes around the ring once more: `n - 1` transfers of keys and values in
# addition to those of `ring_attention`.
#
# - Every leaf of `params` enters varying over both axes; leaves under `layers` are stacked, `[num_layers, ...]`, and
#   attention has a separate dim for heads, as `layer_with` expects.
# - `order` concerns only `context_axis`: it is the same at every index along `data_axis`.
# - Update by plain SGD, `leaf - learning_rate * gradient`. The returned loss is the same on every device.
#
# | budget | |
# |---|---|
# | all-reduce | every leaf once over all devices, the loss and the number of unmasked tokens |
# | permutes | `3 (n - 1)` to `4 n - 2` times a device's keys and values, for each layer |
# | any other collective | none |
# | live temporaries | at most 1.25 times the reference's |
#
# `check` compares parameters after one step and after three. It also compares the update divided by `learning_rate`,
# which is your gradient, leaf by leaf.
#
# Useful: `jax.checkpoint`, `jax.vmap(partial(jax.random.fold_in, key))(chunks)`.


# %%
def cp_transformer_step(
    params: PyTree,
    batch: dict[str, jax.Array],
    model: Model,
    order: Order,
    key: jax.Array,
    rate: float,
    data_axis: str,
    context_axis: str,
    learning_rate: jax.Array,
) -> tuple[PyTree, jax.Array]:
    """Take one step of SGD with a Transformer on ``data`` x ``context``. Runs inside ``shard_map``.

    Args:
        params: ``embed``, ``layers`` and ``head``, whole on every device, all varying over both axes.
        batch: This device's part of ``inputs``, ``targets`` and ``mask``, ``[batch/data, seq/context]``: the chunks
            that ``order`` gives it, one after the other.
        model: The model's pure functions, for ``model.loss``.
        order: The chunk numbers of each device along ``context_axis``.
        key: For dropout, the same on every device.
        rate: Share of elements that are dropped, a Python number; 0 drops nothing.
        data_axis: The mesh axis that sequences are distributed over.
        context_axis: The mesh axis that each sequence is split over.
        learning_rate: A scalar.

    Returns:
        ``(params, loss)``: updated parameters, and the mean loss over all unmasked tokens, the same on every device.
    """
    ### BEGIN SOLUTION
    axes, chunks = (data_axis, context_axis), jnp.array(order)[lax.axis_index(context_axis)]
    length = batch["inputs"].shape[1] // len(chunks)
    places = (chunks[:, None] * length + jnp.arange(length)).reshape(-1)
    key = fold_key_over_axes(key, (data_axis,))
    own = batch["mask"].sum()
    total = jnp.maximum(lax.psum(own, axes), 1)

    @jax.checkpoint
    def layer(x, numbered):
        number, weights = numbered
        keys = jax.vmap(partial(jax.random.fold_in, jax.random.fold_in(key, number)))(chunks)
        attend = partial(ring_attention, order=order, axis_name=context_axis)
        return layer_with(attend, weights, x, split_key(keys), rate), None

    def share_of_loss(params):
        x = params["embed"]["token"][batch["inputs"]] + params["embed"]["position"][places]
        x, _ = lax.scan(layer, x, (jnp.arange(model.num_layers), params["layers"]))
        return model.loss(params["head"], x, batch["targets"], batch["mask"]) * own / total

    shares = jax.value_and_grad(share_of_loss)(params)
    loss, gradients = jax.tree.map(lambda share: lax.psum(share, axes), shares)
    return jax.tree.map(lambda leaf, g: leaf - learning_rate * g, params, gradients), loss
    ### END SOLUTION


# %% [markdown]
# ## In your own words
#
# Llama 3 was trained on sequences of 131,072 tokens without a ring: each device gathers all keys and values, and then
# computes attention. With `n` devices, `h` heads of queries and `h_kv` heads of keys and values, compare gathering with
# a ring: bytes sent, memory, and what hides the transfers. When would you gather?

# %% [markdown]
# ### BEGIN SOLUTION
# Both send the same bytes forward: a device needs the other `(n-1)/n` of the keys and values once. With `T/n` tokens
# per device, a block takes about `4 (T/n)^2 h d / 2` FLOPs in zigzag order, and moves `2 (T/n) h_kv d` numbers to the
# next device. That is `(T/n) h / h_kv` FLOPs for each number: it grows with the tokens on a device and with the heads
# that share keys, and above a length that depends on the machine, the ring hides everything. Gathering waits for its
# transfers, and stores the keys and values of the whole sequence: `2 T h_kv d` numbers, but for only one layer at a
# time. With few heads of keys that is little memory, and little time compared with attention itself, whose work grows
# with the square of `T`. In return it is one large collective and one large kernel instead of `n` small ones, no
# merging, and any mask can be used. So: gather if `h_kv` is small and all keys of a layer fit; use a ring if they do
# not fit, or if blocks are long enough and links slow enough that the exposed gather costs more than the smaller
# kernels.
# ### END SOLUTION

# %% [markdown]
# ## Lab: the same losses everywhere
#
# Here a small Transformer trains on one device, with the course's own `full_loss`, and on two meshes with your step,
# each with a different order. The losses must agree to all digits shown. Compiling the three programs takes about 20
# seconds on two cores.

# %%
if __name__ == "__main__":
    model = transformer(width=16, hidden=32, num_layers=1, num_heads=4, vocab=32, max_seq=16)
    start = jax.jit(model.init)(jax.random.key(0))
    batches = [token_batch(0, i, batch=4, seq=16, vocab=32) for i in range(4)]

    def arranged(tokens, order):
        """Return the tokens in the order in which devices hold their chunks."""
        chunks = np.split(tokens, len(order) * len(order[0]), axis=1)
        return np.concatenate([chunks[number] for device in order for number in device], axis=1)

    def train(mesh, order):
        layers = {**start["layers"], "attention": split_heads(start["layers"]["attention"], 4)}
        rows = [{"mask": np.ones((4, 16), np.float32), **batch} for batch in batches]
        stacked = {name: np.stack([arranged(row[name], order) for row in rows]) for name in rows[0]}

        def local(params, batches):
            def one(params, batch):
                key, rate = jax.random.key(1), jnp.float32(0.5)
                return cp_transformer_step(params, batch, model, order, key, 0.0, "data", "context", rate)

            for axis in ("data", "context"):
                params = jax.tree.map(lambda leaf, axis=axis: as_varying(leaf, axis), params)
            return lax.scan(one, params, batches)[1]

        mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(None, "data", "context")), out_specs=P())
        return jax.jit(mapped)({**start, "layers": layers}, stacked)

    runs = {
        "1 x 4": train(make_mesh({"data": 1, "context": 4}), ((0,), (1,), (2,), (3,))),
        "2 x 4 zigzag": train(make_mesh({"data": 2, "context": 4}), zigzag_order(4)),
    }
    gradient, params = jax.jit(jax.value_and_grad(lambda params, batch: full_loss(model, params, batch))), start
    print("step   one device", *(f"{name:>15}" for name in runs))
    for i, batch in enumerate(batches):
        loss, of_params = gradient(params, batch)
        params = jax.tree.map(lambda leaf, g: leaf - 0.5 * g, params, of_params)
        print(f"{i:4}   {loss:10.5f}", *(f"{losses[i]:15.5f}" for losses in runs.values()))

# %% [markdown]
# ## Lab: when a ring hides its transfers
#
# Finally, your ring on eight H100s with 16,384 tokens, contiguous and zigzag, forward only. Nothing is computed: each
# program is exported and simulated. In contiguous order, which device is idle in which step?

# %%
if __name__ == "__main__":

    def predicted(order):
        """Predict one forward pass on eight H100s."""
        shapes = {
            name: jax.ShapeDtypeStruct((1, 16384, heads, 128), "float32")
            for name, heads in zip("qkv", (16, 4, 4), strict=True)
        }
        spec, mesh = P(None, "context"), {"context": 8}

        def attend(q, k, v):
            return {"out": ring_attention(q, k, v, order, "context")}

        specs, result = dict.fromkeys("qkv", spec), {"out": spec}
        mapped = jax.shard_map(attend, mesh=abstract_mesh(mesh), in_specs=spec, out_specs=result)
        program = export(lambda q, k, v: mapped(q, k, v), shapes, specs, mesh=mesh, out_specs=result)
        return predict(program, machine("8xH100"))

    predictions = {"contiguous": predicted(tuple((i,) for i in range(8))), "zigzag": predicted(zigzag_order(8))}
    for name, prediction in predictions.items():
        print(name)
        for figure, value in prediction.figures().items():
            print(f"    {figure:24} {value}")
    predictions["zigzag"]

# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Tensor parallelism
#
# FSDP splits weights and sends them wherever they are used. Tensor parallelism splits the *computation*: each device
# permanently holds its share of every layer's features and computes only with those. The devices exchange activations
# instead of weights.
#
# You will write it in six functions:
#
# | function | what it does |
# |---|---|
# | `init_dense` | draws each device's part of a dense layer, at the whole layer's scale |
# | `column_parallel_dense` | a dense layer with its outputs split: gathers rows on the way in |
# | `row_parallel_dense` | a dense layer with its inputs split: sums and scatters rows on the way out |
# | `tp_mlp` | these two, one after the other, with no communication in between |
# | `tp_attention` | the same with attention heads |
# | `tp_train_step` | a whole step on `data` x `tensor`, with every gradient at the right scale |

# %%
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from IPython.display import display
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from course.data import regression_batch
from course.machines import machine
from course.mesh import abstract_mesh, as_varying, make_mesh
from course.model import Model, mlp, rms_norm
from course.predict import predict
from course.program import export
from course.render import who_holds
from course.train import make_train_step
from solutions.data_parallel import fold_key_over_axes

PyTree = Any

# %% [markdown]
# ## Initialisation: `init_dense`
#
# On one device, the kernel of a dense layer is initialised with random numbers of standard deviation `1 / sqrt(d_in)`:
# each output is a sum of `d_in` products, and so comes out as large as the inputs. What if a device holds only some of
# the inputs, scales its numbers for those, and the devices' sums are added up?

# %%
if __name__ == "__main__":
    rng, d_in, devices = np.random.default_rng(0), 1024, 8
    x = rng.standard_normal((1000, d_in))
    for what, fan_in in (("all inputs", d_in), ("its own inputs", d_in // devices)):
        kernel = rng.standard_normal(d_in) * fan_in**-0.5
        print(f"scaled by {what:15} ({fan_in:4}): the whole layer's outputs have std {np.std(x @ kernel):.2f}")

# %% [markdown]
# Each device draws its own part, and no device ever holds the whole layer, not even while drawing. `split` says what is
# split over `axis_name`:
#
# | `split` | `kernel` | `bias` |
# |---|---|---|
# | `"columns"` | `[d_in, d_out/axis]` | `[d_out/axis]` |
# | `"rows"` | `[d_in/axis, d_out]` | `[d_out]` |
# | `None` | `[d_in, d_out]` | `[d_out]` |
#
# - Kernel entries have mean 0 and standard deviation `d_in ** -0.5`, with the `d_in` of the **whole** layer. The
#   distribution is normal or uniform, as you like. Biases are zero.
# - Parts of one kernel are drawn independently. Arrays that are not split are the same on every device of the axis.
# - Devices along *other* axes of the mesh hold equal copies.
# - A different key, such as the next seed's, must give numbers that no device draws with this one.
#
# | budget | |
# |---|---|
# | standard deviation of a whole kernel | 0.9 to 1.1 times that of a single device |
# | largest temporary, kernels split over 6 devices | at most twice the size of a device's part of the kernel |
# | operations per device there | at most 400 for each element of its parts |
# | communication | none |
#
# Useful: `jax.random.normal`, `lax.axis_size`, and `fold_key_over_axes` from the chapter `data_parallel`, which
# takes a tuple of axes.


# %%
def init_dense(key: jax.Array, d_in: int, d_out: int, axis_name: str, split: str | None) -> PyTree:
    """Initialise this device's part of a dense layer. Runs inside ``shard_map``.

    Args:
        key: The same on every device.
        d_in: Inputs of the whole layer.
        d_out: Outputs of the whole layer.
        axis_name: The mesh axis.
        split: What is split over the axis: ``"columns"`` of the kernel, its ``"rows"``, or None.

    Returns:
        ``{"kernel": ..., "bias": ...}``: ``[d_in, d_out/axis]`` and ``[d_out/axis]`` for columns, ``[d_in/axis,
        d_out]`` and ``[d_out]`` for rows, ``[d_in, d_out]`` and ``[d_out]`` for None.
    """
    ### BEGIN SOLUTION
    n, scale = lax.axis_size(axis_name), d_in**-0.5
    shape = d_in // (n if split == "rows" else 1), d_out // (n if split == "columns" else 1)
    own_key = fold_key_over_axes(key, (axis_name,)) if split else key
    return {"kernel": scale * jax.random.normal(own_key, shape), "bias": jnp.zeros(shape[1])}
    ### END SOLUTION


# %% [markdown]
# ## Outputs split: `column_parallel_dense`
#
# Between layers, each device holds some **rows** of the activations (tokens, say) with all of their features. Inside a
# layer, each device holds all rows with some of the **features**. A matmul turns one layout into the other:

# %%
if __name__ == "__main__":
    mesh = make_mesh({"tensor": 4})
    rows_split, features_split = P("tensor"), P(None, "tensor")
    arrays = ("x", (8, 6), rows_split), ("kernel", (6, 16), features_split), ("y", (8, 16), features_split)
    for name, shape, spec in arrays:
        dims = ("d_in" if name == "kernel" else "rows", "d_in" if name == "x" else "d_out")
        display(who_holds(jax.device_put(jnp.zeros(shape), NamedSharding(mesh, spec)), title=name, labels=dims))

# %% [markdown]
# To compute its outputs, a device needs its columns of the kernel, which it has, and **all** rows of `x`, of which it
# has a part. Three arrays could be sent: rows of `x`, columns of the kernel, or results. Write it so that the rows are
# sent.
#
# The bias is split like the outputs. `params` may have no bias: then nothing is added. `x` may have any number of
# leading dims, as in `[batch, rows, d_in]`, or none. Rows are always dim -2, and their order does not change.
#
# | | |
# |---|---|
# | `x` | `[..., rows/axis, d_in]`, varying over `axis_name` |
# | result | `[..., rows, d_out/axis]` |
# | gradient of `x` | for this device's own rows |
#
# | budget | forward | backward |
# |---|---|---|
# | all-gather of rows | one, (n-1)/n of `[..., rows, d_in]` | at most one more |
# | reduce-scatter | none | one, of the same size |
# | any other collective | none | none |
#
# Useful: `lax.all_gather(..., axis=..., tiled=True)`. JAX derives its transpose, the reduce-scatter, for you.


# %%
def column_parallel_dense(params: PyTree, x: jax.Array, axis_name: str) -> jax.Array:
    """A dense layer whose outputs are split over an axis; gathers rows. Runs inside ``shard_map``.

    Args:
        params: ``{"kernel": [d_in, d_out/axis], "bias": [d_out/axis]}``, or without a bias.
        x: This device's rows, ``[..., rows/axis, d_in]``.
        axis_name: The mesh axis.

    Returns:
        All rows of this device's outputs, ``[..., rows, d_out/axis]``.
    """
    ### BEGIN SOLUTION
    y = lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True) @ params["kernel"]
    return y + params["bias"] if "bias" in params else y
    ### END SOLUTION


# %% [markdown]
# ## Inputs split: `row_parallel_dense`
#
# Now the way back. Each device has some features of all rows, and the rows of the kernel that belong to them. Every
# output is a sum over all features, and the device can compute a *part of that sum*:

# %%
if __name__ == "__main__":
    x, kernel = np.array([[1.0, 2.0, 3.0, 4.0]]), np.array([[1.0], [10.0], [100.0], [1000.0]])
    parts = [x[:, i : i + 2] @ kernel[i : i + 2] for i in (0, 2)]
    print("device 0 has", parts[0][0], "and device 1", parts[1][0], "of", (x @ kernel)[0])

# %% [markdown]
# Add up the parts over the devices. Each device then needs only its own rows, so send it only those.
#
# The bias is the same on every device, and must be added to each row once. It enters varying over `axis_name`, so your
# gradient of it is this device's own share; `check` adds the shares up.
#
# | | |
# |---|---|
# | `x` | `[..., rows, d_in/axis]`, varying over `axis_name` |
# | result | `[..., rows/axis, d_out]` |
#
# | budget | forward | backward |
# |---|---|---|
# | reduce-scatter of rows | one, (n-1)/n of `[..., rows, d_out]` | none |
# | all-gather | none | one, of the same size |
# | any other collective | none | none |
#
# Useful: `lax.psum_scatter(..., scatter_dimension=..., tiled=True)`.


# %%
def row_parallel_dense(params: PyTree, x: jax.Array, axis_name: str) -> jax.Array:
    """A dense layer whose inputs are split over an axis; sums and scatters rows. Runs inside ``shard_map``.

    Args:
        params: ``{"kernel": [d_in/axis, d_out], "bias": [d_out]}``, or without a bias; the bias is the same on every
            device, but typed as varying over ``axis_name``.
        x: All rows of this device's inputs, ``[..., rows, d_in/axis]``.
        axis_name: The mesh axis.

    Returns:
        This device's rows of all outputs, ``[..., rows/axis, d_out]``.
    """
    ### BEGIN SOLUTION
    y = lax.psum_scatter(x @ params["kernel"], axis_name, scatter_dimension=x.ndim - 2, tiled=True)
    return y + params["bias"] if "bias" in params else y
    ### END SOLUTION


# %% [markdown]
# ## Two layers, one pair of collectives: `tp_mlp`
#
# A column-parallel layer ends with its features split. A row-parallel layer starts with its features split. An
# elementwise function like GELU works on any subset of the features. Here is what it would cost to send each array of a
# Transformer's MLP, for 4,096 rows, width 4,096 and 16,384 hidden features in float32:

# %%
if __name__ == "__main__":
    rows, width, hidden = 4096, 4096, 16384
    sizes = {"rows x width": rows * width, "rows x hidden": rows * hidden, "the kernels": 2 * width * hidden}
    for what, size in sizes.items():
        print(f"{what:18} {4 * size * 7 / 8 / 2**20:6.0f} MiB per device")

# %% [markdown]
# Put the two layers together, with `jax.nn.gelu` in between. `params` uses the names of the course's MLP layer: `up` is
# split by columns, `down` by rows.
#
# | budget | forward | backward |
# |---|---|---|
# | all-gather | exactly one, (n-1)/n of `[..., rows, width]` | one or two |
# | reduce-scatter | exactly one, of the same size | exactly one |
# | any other collective | none | none |
# | predicted time, forward and backward, 4,096 rows on 8 H100s | at most 1.25 times the reference's | |


# %%
def tp_mlp(params: PyTree, x: jax.Array, axis_name: str) -> jax.Array:
    """Two dense layers with a GELU in between, hidden features split over an axis. Runs inside ``shard_map``.

    Args:
        params: ``{"up": ..., "down": ...}``, as for ``column_parallel_dense`` and ``row_parallel_dense``.
        x: This device's rows, ``[..., rows/axis, width]``.
        axis_name: The mesh axis.

    Returns:
        This device's rows, like ``x``.
    """
    ### BEGIN SOLUTION
    hidden = jax.nn.gelu(column_parallel_dense(params["up"], x, axis_name))
    return row_parallel_dense(params["down"], hidden, axis_name)
    ### END SOLUTION


# %% [markdown]
# ## Heads are features: `tp_attention`
#
# Attention mixes positions, and needs all rows of a sequence at once. That is what a device has inside a block.
# Attention works within each **head**, and heads are independent. So give each device some heads: their columns of the
# projection to queries, keys and values, and their rows of the output projection.

# %%
if __name__ == "__main__":
    kernel = jnp.arange(2 * 3 * 4 * 2).reshape(2, 3, 4, 2)  # [width, 3, num_heads, head_dim]
    split = jax.device_put(kernel, NamedSharding(make_mesh({"tensor": 2}), P(None, None, "tensor")))
    for shard in split.addressable_shards:
        print(f"device {shard.device.id} has heads {shard.index[2]}, locally {shard.data.shape}")

# %% [markdown]
# - `kernel` of `qkv` is `[width, 3, num_heads/axis, head_dim]`: queries, keys and values, in this order, each with this
#   device's heads. Its shape gives the number of heads and their size, and `num_heads * head_dim` need not be the
#   width.
# - `kernel` of `out` is `[num_heads/axis, head_dim, width]`. There are no biases.
# - Attention is causal: a position attends to itself and to those before it in its sequence. Scores are divided by
#   `sqrt(head_dim)`.
#
# | budget | forward | backward |
# |---|---|---|
# | all-gather | exactly one, (n-1)/n of `[batch, seq, width]` | one or two |
# | reduce-scatter | exactly one, of the same size | exactly one |
# | any other collective | none, including between the two dense layers | none |
#
# Useful: `reshape`, to use your two dense layers; `jax.nn.dot_product_attention(q, k, v, is_causal=True)` takes
# `[batch, seq, heads, head_dim]`.


# %%
def tp_attention(params: PyTree, x: jax.Array, axis_name: str) -> jax.Array:
    """Causal self-attention with heads split over an axis. Runs inside ``shard_map``.

    Args:
        params: ``{"qkv": {"kernel": [width, 3, num_heads/axis, head_dim]}, "out": {"kernel": [num_heads/axis,
            head_dim, width]}}``.
        x: This device's part of each sequence, ``[batch, seq/axis, width]``.
        axis_name: The mesh axis.

    Returns:
        This device's part of each sequence, like ``x``.
    """
    ### BEGIN SOLUTION
    kernel, out = params["qkv"]["kernel"], params["out"]["kernel"]
    width, _, num_heads, head_dim = kernel.shape
    qkv = column_parallel_dense({"kernel": kernel.reshape(width, -1)}, x, axis_name)
    q, k, v = jnp.moveaxis(qkv.reshape(*qkv.shape[:2], 3, num_heads, head_dim), 2, 0)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return row_parallel_dense({"kernel": out.reshape(-1, width)}, mixed.reshape(*mixed.shape[:2], -1), axis_name)
    ### END SOLUTION


# %% [markdown]
# ## The whole step: `tp_train_step`
#
# Now train the course's MLP on `data` x `tensor`. Rows are split over **both** axes: every device has its own rows, and
# its loss is the mean over those. Embedding, norms, `down`'s biases and the head are whole on every device; `up` and
# the kernel of `down` are split over `tensor_axis`. Only one thing is hard: the scale of the gradients. Here, four
# devices have one row each, and split a "layer" of four features, `sum(w * x)`, whose rows are gathered first:

# %%
if __name__ == "__main__":

    def own_loss(w, c, x):
        """This device's row of ``sum(w * c * x)``: ``w`` is its feature, ``c`` its copy of a scale."""
        rows = lax.all_gather(c * x, "tensor", tiled=True)
        return lax.psum_scatter(rows * w, "tensor", tiled=True).sum()

    def gradients(w, c, x):
        return jax.grad(own_loss, argnums=(0, 1))(w, as_varying(c, "tensor"), x)

    rows = jnp.arange(1.0, 5.0)
    of_w, of_c = jax.shard_map(
        gradients, mesh=make_mesh({"tensor": 4}), in_specs=(P("tensor"), P(), P("tensor")), out_specs=P("tensor")
    )(jnp.ones(4), jnp.ones(1), rows)
    print(f"gradient of the mean loss: {rows.mean():.1f} for each entry of w, {4 * rows.mean():.1f} for c")
    print("gradients of each device's own loss: parts of w", of_w, "copies of c", of_c)

# %% [markdown]
# Each part of `w` receives gradients from the losses of all four devices. A copy of `c` receives one only from its own
# device's loss, but by way of all four parts of `w`. `check` compares every leaf with the gradient of the **mean** over
# all rows of all devices, as a single device would compute it. Before you write the code, work out on paper what to do
# with each kind of leaf over each of the two axes.
# - `params` and `specs` are trees of the same structure. `tensor_axis in spec` says that a leaf is split. Leaves under
#   `layers` are `[num_layers, ...]`, and on entry every leaf varies over both axes.
# - One layer computes `x + tp_mlp(layer, rms_norm(layer["norm"], x))`. `model.embed(params["embed"], inputs)` and
#   `model.loss(params["head"], x, targets)` work on any rows; the latter is the mean over these rows.
# - Update by plain SGD, `leaf - learning_rate * gradient`. Copies must stay equal.
# - The returned loss is the mean over all rows of all devices, the same everywhere.
#
# | budget | |
# |---|---|
# | all-gather | two or three per layer, (n-1)/n of `[rows, width]` for the rows at one index along `data_axis` |
# | reduce-scatter | two per layer, of the same size |
# | all-reduce | each leaf, and the loss, once over each axis that it has to be averaged over |
# | any other collective | none |
#
# `check` compares parameters after one step and after three. It also compares the update divided by `learning_rate`,
# which is your gradient, leaf by leaf, and its norm over all leaves.
#
# Useful: `jax.value_and_grad`, `lax.scan` over the layers, `lax.pmean` over one axis or a tuple of several.


# %%
def tp_train_step(
    params: PyTree,
    specs: PyTree,
    batch: dict[str, jax.Array],
    model: Model,
    data_axis: str,
    tensor_axis: str,
    learning_rate: jax.Array,
) -> tuple[PyTree, jax.Array]:
    """Take one step of SGD with the course's MLP on ``data`` x ``tensor``. Runs inside ``shard_map``.

    Args:
        params: This device's part, all leaves varying over both axes. Under ``layers``, leaves are ``[num_layers,
            ...]``, and ``up`` and ``down`` are split as for ``tp_mlp``; everything else is whole.
        specs: The ``PartitionSpec`` of each leaf, which names ``tensor_axis`` if the leaf is split.
        batch: This device's rows, ``inputs`` and ``targets``, ``[batch/(data * tensor), ...]``.
        model: The model's pure functions.
        data_axis: The mesh axis along which all parameters are the same.
        tensor_axis: The mesh axis along which hidden features are split.
        learning_rate: A scalar.

    Returns:
        ``(params, loss)``: the updated parameters, and the mean loss over all rows, the same on every device.
    """

    ### BEGIN SOLUTION
    def layer(x, weights):
        return x + tp_mlp(weights, rms_norm(weights["norm"], x), tensor_axis), None

    def loss_of(params):
        x = model.embed(params["embed"], batch["inputs"])
        x, _ = lax.scan(layer, x, params["layers"])
        return model.loss(params["head"], x, batch["targets"])

    def mean(gradient, spec):
        if tensor_axis in spec:
            return lax.pmean(gradient, data_axis) / lax.axis_size(tensor_axis)
        return lax.pmean(gradient, (data_axis, tensor_axis))

    loss, gradients = jax.value_and_grad(loss_of)(params)
    gradients = jax.tree.map(mean, gradients, specs)
    updated = jax.tree.map(lambda leaf, gradient: leaf - learning_rate * gradient, params, gradients)
    return updated, lax.pmean(loss, (data_axis, tensor_axis))
    ### END SOLUTION


# %% [markdown]
# ## In your own words
#
# A colleague trains with Adam on `data=2 x tensor=4` and has forgotten to divide the gradients of split leaves by the
# size of the tensor axis. "The loss falls just as it does on one device, so it cannot matter." Say why the loss looks
# right, name two things that will go wrong nevertheless, and describe the cheapest test that would have found the
# mistake.

# %% [markdown]
# ### BEGIN SOLUTION
# Adam divides the running mean of a leaf's gradient by the root of its running square. A factor of 4 on both cancels,
# up to Adam's epsilon, so the updates are nearly those of the right gradient. Two things do not cancel. One is the norm
# over all leaves: clipping by global norm starts at a different threshold, and once it clips, it scales everything down
# too far, so the gradients of copies come out too small. The other is everything that uses raw gradients, such as SGD,
# weight decay that is added to the gradient, gradient noise scales, or logged gradient norms. The error also changes
# with the mesh: a run that is resumed on `tensor=8` is off by 8. The cheapest test takes one step of SGD from the same
# parameters and the same batch on one device and on a mesh whose axes have different sizes, and prints the ratio of the
# two updates leaf by leaf. All ratios should be 1; any other ratio equals the size of an axis, and so identifies it.
# ### END SOLUTION

# %% [markdown]
# ## Lab: the same losses everywhere
#
# Your step trains one model on three meshes, compared with the course's plain single-device step. The rows are the
# same, only split differently.

# %%
if __name__ == "__main__":
    model = mlp(width=32, hidden=128, num_layers=4, num_inputs=8, num_outputs=4)
    params = jax.jit(model.init)(jax.random.key(0))
    batches = [regression_batch(0, i, batch=32, num_inputs=8, num_outputs=4) for i in range(8)]
    stacked = jax.tree.map(lambda *some: jnp.stack(some), *batches)
    specs = jax.tree.map(lambda _: P(), params)
    specs["layers"]["up"] = {"kernel": P(None, None, "tensor"), "bias": P(None, "tensor")}
    specs["layers"]["down"]["kernel"] = P(None, "tensor")

    def train(data, tensor):
        def local(params, batches):
            def one(params, batch):
                return tp_train_step(params, specs, batch, model, "data", "tensor", jnp.float32(0.03))

            own = jax.tree.map(lambda leaf: as_varying(as_varying(leaf, "data"), "tensor"), params)
            return lax.scan(one, own, batches)[1]

        mesh, in_specs = make_mesh({"data": data, "tensor": tensor}), (specs, P(None, ("data", "tensor")))
        run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=P()))
        return np.asarray(run(params, stacked))

    shapes = ((8, 1), (2, 4), (1, 8))
    runs = {f"{data} x {tensor}": train(data, tensor) for data, tensor in shapes}
    plain_step, state = make_train_step(model, optax.sgd(0.03)), optax.sgd(0.03).init(params)
    plain = jax.tree.map(jnp.copy, params)
    print("step  one device", *(f"{name:>10}" for name in runs))
    for i, batch in enumerate(batches):
        plain, state, loss = plain_step(plain, state, batch)
        print(f"{i:4}{loss:12.5f}", *(f"{losses[i]:10.5f}" for losses in runs.values()))

# %% [markdown]
# ## Lab: a whole layer from its parts
#
# Here the parts that the devices drew are assembled into a whole layer: its standard deviation is the same as on one
# device. Try `d_in // axis size` as the fan-in in your `init_dense`, and look again.

# %%
if __name__ == "__main__":
    mesh = make_mesh({"data": 2, "tensor": 4})
    for split, spec in (("columns", P(None, "tensor")), ("rows", P("tensor")), (None, P())):

        def draw(key, split=split):
            return init_dense(key, 256, 512, "tensor", split)["kernel"]

        drawn = jax.shard_map(draw, mesh=mesh, in_specs=P(), out_specs=spec)(jax.random.key(0))
        local = drawn.addressable_shards[0].data.shape
        spread = jnp.std(drawn) * 256**0.5
        print(f"split by {split!s:8} {drawn.shape}, parts {local!s:10} std {spread:.3f} times a single device's")

# %% [markdown]
# ## Lab: where the time goes
#
# Finally, here is your MLP at the size it is graded on, forward and backward, on 8 H100s: a device's computation and
# communication. The first gather has nothing to hide behind, and the products after it wait. The next chapter does
# something about that.

# %%
if __name__ == "__main__":
    width, hidden = 4096, 16384
    kernels = {
        "up": {"kernel": P(None, "tensor"), "bias": P("tensor")},
        "down": {"kernel": P("tensor"), "bias": P("tensor")},
    }
    sizes = {
        "up": {"kernel": (width, hidden), "bias": (hidden,)},
        "down": {"kernel": (hidden, width), "bias": (8 * width,)},  # every device brings its own copy
    }

    def forward_and_backward(params, x, g):
        y, back = jax.vjp(lambda params, x: tp_mlp(params, x, "tensor"), params, x)
        return {"y": y, "gradients": back(g)}

    mesh, rows = abstract_mesh({"tensor": 8}), jax.ShapeDtypeStruct((4096, width), np.float32)
    in_specs = {"params": kernels, "x": P("tensor"), "g": P("tensor")}
    out_specs = {"y": P("tensor"), "gradients": (kernels, P("tensor"))}
    mapped = jax.shard_map(forward_and_backward, mesh=mesh, in_specs=tuple(in_specs.values()), out_specs=out_specs)
    inputs = {
        "params": jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s, np.float32), sizes, is_leaf=lambda s: isinstance(s, tuple)
        ),
        "x": rows,
        "g": rows,
    }
    step = export(lambda params, x, g: mapped(params, x, g), inputs, in_specs, mesh={"tensor": 8}, out_specs=out_specs)
    prediction = predict(step, machine("8xH100"))
    for name, figure in prediction.figures().items():
        print(f"{name:24} {figure}")
    prediction  # noqa: B018  a notebook shows it as a picture

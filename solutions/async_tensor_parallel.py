# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Asynchronous tensor parallelism
#
# In tensor parallelism, every device holds a part of the features. A layer gathers the rows of all devices before its
# product, or scatters sums of rows after it, and in both cases nothing is computed during the transfer. But a product
# can be computed row by row: a device can start before it has all rows, and can send before it has finished all of
# them. Split the rows into as many chunks as there are devices, pass the chunks round a ring, and multiply one while
# the next one travels.
# | function | replaces | what it does |
# |---|---|---|
# | `ring_gather_matmul` | all-gather, then product | multiplies each device's rows as they arrive |
# | `matmul_ring_scatter` | product, then reduce-scatter | passes partial sums on; each device adds its product |
# | `bidirectional_gather_matmul` | the first ring | sends half of the data the other way round |
# | `bidirectional_matmul_scatter` | the second ring | the same for partial sums |
# | `async_tp_mlp` | `tp_mlp` | two layers whose transfers all overlap with products, in both passes |

# %%
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from course.machines import machine
from course.mesh import abstract_mesh, make_mesh, vary_alike
from course.predict import predict
from course.program import export

PyTree = Any

# %% [markdown]
# ## Rules for all five
#
# - They run inside `jax.shard_map`. Rows are the second-to-last dim, features the last: `[..., rows, features]`. There
#   may be a leading batch dim, `[batch, rows, features]`, or none.
# - Any size of the axis works, 1 included; the axis need not be called `tensor`, and the mesh may have other axes, over
#   which the batch is split.
# - The only collective is `lax.ppermute`. No other is allowed, because the others cannot be split into steps.
# - Your program is what gets graded. On the timeline, computations run in the order in which you write them, and a
#   transfer overlaps with computations that neither use its result nor compute its input. **An iteration of a loop ends
#   when its computations and its transfers have ended**: the data an iteration sends must be ready when it begins.
# - Loops may be `lax.scan`, `lax.fori_loop` or Python's `for`. XLA's GPU compiler keeps a scan as it is, but reorders
#   an unrolled loop: `meshcraft site profiling/async_tensor_parallel` shows how.
# - A loop's carry must keep its type, and an array of zeros does not vary, but your data does.
#   `vary_alike(zeros, x)[0]` is `zeros`, typed as varying over all axes over which `x` varies.
#
# "The synchronous version" is one line: `lax.all_gather(...) @ kernel`, or `lax.psum_scatter(x @ kernel, ...)`. Time
# and memory are graded at 4,096 rows (8,192 for the bidirectional functions), width 4,608 and 18,432 hidden features in
# float32, on 8 H100s. Is there enough computation to hide behind at that size? Compare the transfer of one chunk with
# its product:

# %%
if __name__ == "__main__":
    rows, width, hidden, h100 = 4096 // 8, 4608, 18432 // 8, machine("8xH100")
    product = h100.matmul_seconds(2 * rows * width * hidden, 0, "f32")
    latency, rate = h100.transfer("collective_permute", (0, 1), 4 * rows * width, 4 * rows * width, pair=(0, 1))
    sent = latency + 4 * rows * width / rate
    print(f"a product of {rows} rows: {1e6 * product:.1f} us; sending them to the next device: {1e6 * sent:.1f} us")

# %% [markdown]
# ## Rows travel: `ring_gather_matmul`
#
# Each device starts with its rows `x` and its columns of the kernel, and ends with **all** rows times its columns: the
# result of `lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True) @ kernel`.
#
# | budget | |
# |---|---|
# | bytes sent per device, forward | exactly (n-1)/n of all rows, by `ppermute` |
# | bytes sent, forward and backward | two to three times that |
# | any other collective | none |
# | predicted time on 8 H100s, forward | at most 0.75 times the synchronous version's |
# | temporaries, forward | at most 0.6 times the synchronous version's |
#
# Gradients of `x` and of `kernel` are checked, and JAX derives them for you: a permute's transpose is the permute with
# its pairs reversed. Get this right first. `async_tp_mlp` will need a faster derivative; you can come back here then.
#
# With 4 devices, if every device sends to the next, these are the devices whose rows each device multiplies, step by
# step:

# %%
if __name__ == "__main__":
    size = 4
    for device in range(size):
        owners = [(device - step) % size for step in range(size)]
        print(f"device {device} multiplies the rows of", " then ".join(map(str, owners)))


# %%
def ring_gather_matmul(x: jax.Array, kernel: jax.Array, axis_name: str) -> jax.Array:
    """Multiply the rows of all devices by this device's kernel. Runs inside ``shard_map``.

    Args:
        x: This device's rows, ``[..., rows/axis, d_in]``.
        kernel: This device's columns, ``[d_in, d_out/axis]``.
        axis_name: The mesh axis to gather over, of any size.

    Returns:
        ``[..., rows, d_out/axis]``.
    """
    ### BEGIN SOLUTION
    size, length = lax.axis_size(axis_name), x.shape[-2]
    to_next = [(i, (i + 1) % size) for i in range(size)]

    def ring(x, kernel, keep):
        """Return the products of all rows; if ``keep``, also all rows."""
        index = lax.axis_index(axis_name)

        def place(wholes, chunk, step):
            at = (index - step) % size * length
            parts = (chunk @ kernel, chunk)[: len(wholes)]
            return [lax.dynamic_update_slice_in_dim(w, p, at, -2) for w, p in zip(wholes, parts, strict=True)]

        def pass_on(carry, step):
            wholes, chunk = carry
            coming = lax.ppermute(chunk, axis_name, to_next)
            return (place(wholes, chunk, step), coming), None

        shapes = [(*x.shape[:-2], size * length, width) for width in (kernel.shape[1], x.shape[-1])[: 1 + keep]]
        empty = [vary_alike(jnp.zeros(shape, x.dtype), x)[0] for shape in shapes]
        (wholes, last), _ = lax.scan(pass_on, (empty, x), jnp.arange(size - 1))
        return place(wholes, last, size - 1)

    def forward(x, kernel):
        product, rows = ring(x, kernel, keep=True)
        return product, (rows, kernel)

    def backward(saved, gradient):
        rows, kernel = saved
        index = lax.axis_index(axis_name)

        def own(number):
            return lax.dynamic_slice_in_dim(gradient, number % size * length, length, -2) @ kernel.T

        def pass_on(partial_sum, step):
            return lax.ppermute(partial_sum, axis_name, to_next) + own(index - 1 - step), None

        of_x, _ = lax.scan(pass_on, own(index - 1), jnp.arange(1, size))
        return of_x, jnp.einsum("...ri,...ro->io", rows, gradient)

    product = jax.custom_vjp(lambda x, kernel: ring(x, kernel, keep=False)[0])
    product.defvjp(forward, backward)
    return product(*vary_alike(x, kernel))
    ### END SOLUTION


# %% [markdown]
# ## Sums travel: `matmul_ring_scatter`
#
# Each device starts with all rows of its part of the features, and with its rows of the kernel. Its product is only a
# summand of the result. Device `i` ends with the complete sums of chunk `i` of the rows: the result of
# `lax.psum_scatter(x @ kernel, axis_name, scatter_dimension=x.ndim - 2, tiled=True)`.
#
# A partial sum arrives, the device adds its own product for those rows, and passes the sum on. The product does not
# depend on the sum that arrives; the addition does.
#
# | budget | |
# |---|---|
# | bytes sent per device, forward | exactly (n-1)/n of all rows of the result, by `ppermute` |
# | bytes sent, forward and backward | two to three times that |
# | any other collective | none |
# | predicted time on 8 H100s, forward | at most 0.8 times the synchronous version's |
# | temporaries, forward | at most 0.6 times the synchronous version's |
#
# The number of rows is always divisible by `n`. With two devices and two rows of one number each:

# %%
if __name__ == "__main__":
    products = jnp.array([[1, 2], [30, 40]])
    print("device 0 computes", products[0], "and device 1 computes", products[1])
    print(
        "row 0: device 1 sends", products[1, 0], "and device 0 adds", products[0, 0], "and keeps", products[:, 0].sum()
    )


# %%
def matmul_ring_scatter(x: jax.Array, kernel: jax.Array, axis_name: str) -> jax.Array:
    """Compute this device's rows of the product, summed over devices. Runs inside ``shard_map``.

    Args:
        x: All rows and this device's features, ``[..., rows, d_in/axis]``.
        kernel: This device's rows of the kernel, ``[d_in/axis, d_out]``.
        axis_name: The mesh axis to sum over, of any size.

    Returns:
        ``[..., rows/axis, d_out]``.
    """
    ### BEGIN SOLUTION
    size = lax.axis_size(axis_name)
    to_next = [(i, (i + 1) % size) for i in range(size)]

    def ring(x, kernel):
        index, length = lax.axis_index(axis_name), x.shape[-2] // size

        def own(number):
            return lax.dynamic_slice_in_dim(x, number % size * length, length, -2) @ kernel

        def pass_on(partial_sum, step):
            coming = lax.ppermute(partial_sum, axis_name, to_next)
            return coming + own(index - 1 - step), None

        return lax.scan(pass_on, own(index - 1), jnp.arange(1, size))[0]

    def backward(saved, gradient):
        x, kernel = saved
        index, length = lax.axis_index(axis_name), gradient.shape[-2]

        def place(wholes, chunk, step):
            at, parts = (index - step) % size * length, (chunk @ kernel.T, chunk)
            return [lax.dynamic_update_slice_in_dim(w, p, at, -2) for w, p in zip(wholes, parts, strict=True)]

        def pass_on(carry, step):
            wholes, chunk = carry
            coming = lax.ppermute(chunk, axis_name, to_next)
            return (place(wholes, chunk, step), coming), None

        shape = (*x.shape[:-1], gradient.shape[-1])
        empty = [jnp.zeros_like(x), vary_alike(jnp.zeros(shape, x.dtype), x)[0]]
        (wholes, last), _ = lax.scan(pass_on, (empty, gradient), jnp.arange(size - 1))
        of_x, gradients = place(wholes, last, size - 1)
        return of_x, jnp.einsum("...ri,...ro->io", x, gradients)

    product = jax.custom_vjp(ring)
    product.defvjp(lambda x, kernel: (ring(x, kernel), (x, kernel)), backward)
    return product(*vary_alike(x, kernel))
    ### END SOLUTION


# %% [markdown]
# ## Both directions: `bidirectional_gather_matmul`
#
# A ring uses every link in one direction only. Where neighbours are joined by direct links, as TPUs are, half of the
# bandwidth is idle. So send half of each chunk to the next device and the other half to the previous one. After `k`
# steps a device holds half of the rows of the device `k` places before it, and half of the rows of the device `k`
# places after it.
#
# Which half is up to you. With half of the **features**, each half of a chunk is multiplied by its half of the kernel's
# rows, and two products have to be *added* to the same rows of the result, at different times. With half of the
# **rows**, nothing is added, and each half is multiplied by the whole kernel. Rows per device and features are both
# even. The result is the same as that of `ring_gather_matmul`.
#
# | budget | |
# |---|---|
# | bytes sent per device, forward | exactly (n-1)/n of all rows, by `ppermute` |
# | of these, towards higher and towards lower indices | equally many |
# | bytes sent, forward and backward | two to three times that |
# | any other collective | none |
# | predicted time on 8 H100s, 8,192 rows, forward | at most 0.9 times the synchronous version's |
#
# An H100 behind an NVSwitch sends with its full bandwidth to any single device, so there this is no faster than a
# one-way ring. It should still be faster than waiting.

# %%
if __name__ == "__main__":
    size, chunk = 8, 4 * 1024 * 4608
    one_way = (size - 1) * chunk
    print(f"one-way ring: {one_way:,} bytes over each link; both ways: {one_way // 2:,} bytes in each direction")


# %%
def bidirectional_gather_matmul(x: jax.Array, kernel: jax.Array, axis_name: str) -> jax.Array:
    """Like ``ring_gather_matmul``, but sends half of each chunk each way round. Runs inside ``shard_map``.

    Args:
        x: This device's rows, ``[..., rows/axis, d_in]``.
        kernel: This device's columns, ``[d_in, d_out/axis]``.
        axis_name: The mesh axis to gather over, of any size.

    Returns:
        ``[..., rows, d_out/axis]``.
    """
    ### BEGIN SOLUTION
    size, index, length = lax.axis_size(axis_name), lax.axis_index(axis_name), x.shape[-2]
    to_next = [(i, (i + 1) % size) for i in range(size)]
    to_previous = [(i, (i - 1) % size) for i in range(size)]

    def place(whole, halves, step):
        for half, part, owner in zip(halves, jnp.split(kernel, 2), (index - step, index + step), strict=True):
            at = owner % size * length
            known = lax.dynamic_slice_in_dim(whole, at, length, -2)
            whole = lax.dynamic_update_slice_in_dim(whole, known + half @ part, at, -2)
        return whole

    def pass_on(carry, step):
        whole, (left, right) = carry
        coming = lax.ppermute(left, axis_name, to_next), lax.ppermute(right, axis_name, to_previous)
        return (place(whole, (left, right), step), coming), None

    x, kernel = vary_alike(x, kernel)
    empty = jnp.zeros((*x.shape[:-2], size * length, kernel.shape[-1]), x.dtype)
    halves = tuple(jnp.split(x, 2, -1))
    (whole, last), _ = lax.scan(pass_on, (vary_alike(empty, x)[0], halves), jnp.arange(size - 1))
    return place(whole, last, size - 1)
    ### END SOLUTION


# %% [markdown]
# ## Sums both ways: `bidirectional_matmul_scatter`
#
# Now the same for partial sums: half of each travels to the next device, half to the previous one. Half of the result's
# **features** is half of the kernel's columns; half of the **rows** is half of each chunk. Both numbers are even. Sums
# that travel the other way have to start on a different device. Which one, if each sum is to end on its owner?
#
# | budget | |
# |---|---|
# | bytes sent per device, forward | exactly (n-1)/n of all rows of the result, by `ppermute` |
# | of these, towards higher and towards lower indices | equally many |
# | bytes sent, forward and backward | two to three times that |
# | any other collective | none |
# | predicted time on 8 H100s, 8,192 rows, forward | at most 0.9 times the synchronous version's |

# %%
if __name__ == "__main__":
    size, owner = 4, 2
    upwards = [(owner + 1 + step) % size for step in range(size)]
    print(f"rows of device {owner}, sum that travels upwards: added to on devices", *upwards)


# %%
def bidirectional_matmul_scatter(x: jax.Array, kernel: jax.Array, axis_name: str) -> jax.Array:
    """Like ``matmul_ring_scatter``, but sends half of each sum each way round. Runs inside ``shard_map``.

    Args:
        x: All rows and this device's features, ``[..., rows, d_in/axis]``.
        kernel: This device's rows of the kernel, ``[d_in/axis, d_out]``.
        axis_name: The mesh axis to sum over, of any size.

    Returns:
        ``[..., rows/axis, d_out]``.
    """
    ### BEGIN SOLUTION
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    length = x.shape[-2] // size
    to_next = [(i, (i + 1) % size) for i in range(size)]
    to_previous = [(i, (i - 1) % size) for i in range(size)]
    left, right = jnp.split(kernel, 2, -1)

    def own(number, part):
        return lax.dynamic_slice_in_dim(x, number % size * length, length, -2) @ part

    def pass_on(sums, step):
        forth, back = lax.ppermute(sums[0], axis_name, to_next), lax.ppermute(sums[1], axis_name, to_previous)
        return (forth + own(index - 1 - step, left), back + own(index + 1 + step, right)), None

    sums = own(index - 1, left), own(index + 1, right)
    return jnp.concatenate(lax.scan(pass_on, sums, jnp.arange(1, size))[0], -1)
    ### END SOLUTION


# %% [markdown]
# ## Both passes: `async_tp_mlp`
#
# Now write an MLP to replace `tp_mlp`: rows in, `up`, `jax.nn.gelu` with its defaults, `down`, rows out. The forward
# pass is your two rings and three more operations. The bias of `down` is whole on every device, and is added once,
# when the sum is complete.
#
# This time the **backward** pass is graded as well. JAX's derivative of a ring is a ring, and hides its transfers. But
# it is slow for another reason: it computes the gradient of a kernel as a sum over chunks of rows, and in every step
# reads and writes the whole kernel's gradient. Compare that with the product that it adds:

# %%
if __name__ == "__main__":
    kernel = 4 * width * hidden
    added = h100.kernel_seconds(3 * kernel)
    print(f"product for the kernel's gradient, one chunk of rows: {1e6 * product:.1f} us")
    print(f"adding it, {3 * kernel / 2**20:.1f} MiB of memory traffic: {1e6 * added:.1f} us, in each of 8 steps")

# %% [markdown]
# If the ring is a scan, such a derivative makes the step slower than no ring at all. (If it is a loop unrolled in
# Python, it is not slower, but keeps every product of that sum until the end.) It is better to compute the gradient of
# a kernel at once, from all rows: every device sees them all, one chunk after the other, and can put each in its place
# as it passes. Write the derivative of each ring with `jax.custom_vjp`, either here or in the functions above; the
# notebook of `fsdp` has an example at `gather_params`. Two things help:
#
# - The gradient of a gather is a scatter, and vice versa. You have both.
# - `jax.custom_vjp` must return each gradient with the type of the corresponding input. `vary_alike(x, kernel)` makes
#   both inputs vary over the same axes *before* you pass them.
#
# | budget | |
# |---|---|
# | exposed communication on 8 H100s, forward and backward | at most 0.4 times `tp_mlp`'s |
# | predicted time on 8 H100s, forward and backward | at most `tp_mlp`'s |
# | temporaries, forward and backward | at most 1.5 times `tp_mlp`'s |
# | bytes sent per device, forward and backward | four to six times (n-1)/n of all rows, by `ppermute` |
# | any other collective | none |
#
# The incoming gradient depends on the layer's output, so the backward pass begins when the forward pass has ended. Each
# device's gradients are its own: sums over all rows for its parts of the kernels, and over its own rows for the bias of
# `down`. The parameters may be replicated over the other axes of the mesh, as in the lab below; JAX then sums their
# gradients over these axes.


# %%
def async_tp_mlp(params: PyTree, x: jax.Array, axis_name: str) -> jax.Array:
    """Apply the two dense layers of an MLP, in place of ``tp_mlp``. Runs inside ``shard_map``.

    Args:
        params: ``{"up": {"kernel": [width, hidden/axis], "bias": [hidden/axis]}, "down": {"kernel":
            [hidden/axis, width], "bias": [width]}}``.
        x: This device's rows, ``[..., rows/axis, width]``.
        axis_name: The mesh axis that features are split over, of any size.

    Returns:
        ``[..., rows/axis, width]``.
    """
    ### BEGIN SOLUTION
    hidden = ring_gather_matmul(x, params["up"]["kernel"], axis_name) + params["up"]["bias"]
    return matmul_ring_scatter(jax.nn.gelu(hidden), params["down"]["kernel"], axis_name) + params["down"]["bias"]
    ### END SOLUTION


# %% [markdown]
# ## In your own words
#
# You replace `tp_mlp` with `async_tp_mlp` on 8 real GPUs, and the step becomes *slower*. Name three things that cost
# time in the ring but not in the synchronous version. For one of them, say which sizes make it better and which make it
# worse. A few sentences are enough.

# %% [markdown]
# ### BEGIN SOLUTION
# A ring sends `n - 1` small messages where a collective sends one large one. Each has its own latency, and a message of
# a few megabytes may reach only a small fraction of the bandwidth; more rows or a larger width per device make the
# messages larger. A product of one chunk's rows may be too small to use the whole GPU, or be limited by reading the
# kernel, which happens in every step; more rows per chunk help, more devices make it worse. Chunks are copied to their
# places in the result and into the loop's carry, and partial sums are read and written in every step. And kernels and
# transfers share the GPU: a transfer uses some of its cores and memory bandwidth. If the transfers took little of the
# step in the first place (wide layers, few devices), there is less to gain than all of this costs.
# ### END SOLUTION

# %% [markdown]
# ## Lab: the same numbers
#
# Here your MLP runs on several meshes of emulated devices, compared with the same layers on one device: the largest
# difference in the result, and in the gradient of the first kernel, relative to the largest element.

# %%
if __name__ == "__main__":
    keys = jax.random.split(jax.random.key(0), 3)
    layers = {
        "up": {"kernel": jax.random.normal(keys[0], (16, 64)) / 4, "bias": jnp.ones(64)},
        "down": {"kernel": jax.random.normal(keys[1], (64, 16)) / 8, "bias": jnp.ones(16)},
    }
    in_parts = {
        "up": {"kernel": P(None, "tensor"), "bias": P("tensor")},
        "down": {"kernel": P("tensor"), "bias": P()},
    }
    entering = jax.random.normal(keys[2], (8, 32, 16))

    def one_device(layers, x):
        active = jax.nn.gelu(x @ layers["up"]["kernel"] + layers["up"]["bias"])
        return active @ layers["down"]["kernel"] + layers["down"]["bias"]

    def value_and_gradient(function):
        def loss(layers, x):
            y = function(layers, x)
            return jnp.sum(y**2), y

        gradients, y = jax.jit(jax.grad(loss, has_aux=True))(layers, entering)
        return y, gradients["up"]["kernel"]

    def off(result, expected):
        return float(jnp.max(jnp.abs(result - expected)) / jnp.max(jnp.abs(expected)))

    expected = value_and_gradient(one_device)
    for axes in ({"data": 1, "tensor": 8}, {"data": 4, "tensor": 2}, {"data": 8, "tensor": 1}):
        specs = {"in_specs": (in_parts, P("data", "tensor")), "out_specs": P("data", "tensor")}
        on_mesh = jax.shard_map(lambda layers, x: async_tp_mlp(layers, x, "tensor"), mesh=make_mesh(axes), **specs)
        value, gradient = map(off, value_and_gradient(on_mesh), expected)
        print(f"{axes!s:28} value off by {value:.0e}, gradient by {gradient:.0e}")

# %% [markdown]
# ## Lab: where it wins, and where it loses
#
# Finally, compare your first ring with the synchronous version, in bfloat16, on two machines. The idealised H100
# reaches every published peak. The calibrated one uses measured tables instead, for products and for collectives by
# size. Nothing is computed: `export` captures the program, and `predict` simulates it. Which column would you believe?

# %%
if __name__ == "__main__":

    def synchronous(x, kernel, axis_name):
        return lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True) @ kernel

    def gathered_product(function, rows, width, hidden):
        specs = {"x": P("tensor"), "kernel": P(None, "tensor")}
        shapes = {"x": (rows, width), "kernel": (width, hidden)}
        inputs = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
        mesh, out_specs = {"tensor": 8}, {"y": P(None, "tensor")}

        def local(x, kernel):
            return {"y": function(x, kernel, "tensor")}

        mapped = jax.shard_map(local, mesh=abstract_mesh(mesh), in_specs=tuple(specs.values()), out_specs=out_specs)
        return export(lambda x, kernel: mapped(x, kernel), inputs, specs, mesh=mesh, out_specs=out_specs)

    print("ring / synchronous       8xH100   8xH100-calibrated")
    for rows in (1024, 4096, 65536):
        programs = [gathered_product(f, rows, 4608, 18432) for f in (ring_gather_matmul, synchronous)]
        steps = [[predict(p, name).timeline.seconds for p in programs] for name in ("8xH100", "8xH100-calibrated")]
        print(f"{rows:6} rows         ", *(f"{ring / plain:12.2f}" for ring, plain in steps))
    prediction = predict(gathered_product(ring_gather_matmul, 4096, 4608, 18432), "8xH100")
    prediction  # noqa: B018  a notebook shows it as a picture

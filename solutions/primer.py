# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Primer: many devices in 15 minutes
#
# Every chapter of this course builds on five ideas. This notebook shows each of them once, with something to run and
# look at. There is nothing to solve and nothing is graded: run a cell, look, change it, run it again.
#
# | idea | what it says |
# |---|---|
# | mesh | the devices, arranged in a grid with named axes |
# | `PartitionSpec` | how the dims of an array are split over the axes, and so which device holds which block |
# | `shard_map` | one function, run by every device on its own block |
# | varying values | which values may differ from device to device, and how that affects a gradient |
# | timeline | what a device does when, and what it waits for |
#
# You need Python and basic JAX: `jit`, `grad`, arrays. You do not need a GPU: importing `course` gives this notebook 8
# emulated devices on your CPU.

# %%
import jax
import jax.numpy as jnp
from IPython.display import HTML, display
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from course.mesh import abstract_mesh, make_mesh
from course.predict import predict
from course.program import costs, export, parse
from course.render import who_holds
from course.render.panels import comparison_html

# %% [markdown]
# ## A mesh: devices in a grid
#
# A **mesh** is a grid of devices. Its **axes** have names, and from here on we refer to devices by these names rather
# than by number. This course names an axis after what is split over it: `data` for rows of the batch, `tensor` for
# features, `pipe` for layers. (An array has *dims*, a mesh has *axes*; we keep the two words apart.)

# %%
if __name__ == "__main__":
    # --8<-- [start:mesh]
    mesh = make_mesh({"data": 4, "tensor": 2})
    print(mesh.device_ids)
    # --8<-- [end:mesh]

# %% [markdown]
# Two devices in the same row of this grid differ only in `tensor`, two in the same column only in `data`. An operation
# "over `data`" involves the four devices of a column, and happens in both columns at the same time.
#
# ## A `PartitionSpec`: how an array is split
#
# A spec has an entry for each dim of an array:
# - an axis name: this dim is split into as many equal blocks as the axis has devices;
# - `None`: this dim is not split;
# - a tuple of axis names: split over all of them, the first varying slowest.
#
# Along an axis that no entry names, devices hold **copies**. Trailing entries may be left out, so `P()` means "every
# device holds everything".

# %%
if __name__ == "__main__":
    # --8<-- [start:placed]
    rows = jnp.arange(8 * 16, dtype=jnp.float32).reshape(8, 16)
    rows = jax.device_put(rows, NamedSharding(mesh, P("data", None)))
    display(who_holds(rows, labels=("batch", "d_model"), show_spec=True))
    # --8<-- [end:placed]

# %% [markdown]
# On the left is the array, split into blocks, each labelled with the devices that hold it; on the right is the mesh, in
# the same colours. Before you run the next cell, predict for each spec which block device 5 will hold.

# %%
if __name__ == "__main__":
    # --8<-- [start:specs]
    for spec in (P(None, "tensor"), P("data", "tensor"), P(("tensor", "data"), None), P()):
        placed = jax.device_put(rows, NamedSharding(mesh, spec))
        display(who_holds(placed, labels=("batch", "d_model"), show_spec=True))
    # --8<-- [end:specs]

# %% [markdown]
# The array's shape is always the global one, `(8, 16)`. Each device holds one block, and only the bytes of that block
# count against its memory:

# %%
if __name__ == "__main__":
    # --8<-- [start:bytes]
    for spec in (P(), P("data"), P("data", "tensor")):
        placed = jax.device_put(rows, NamedSharding(mesh, spec))
        block = placed.addressable_shards[0].data
        print(f"{spec!s:20} {placed.shape!s:9} block {block.shape!s:8} {block.nbytes:4} bytes on each device")
    # --8<-- [end:bytes]

# %% [markdown]
# A spec cannot express two things: blocks of unequal size (a dim must be divisible by the size of its axes), and one
# axis used for two dims.
#
# ## `shard_map`: what one device does
#
# `jax.shard_map` takes a function of *blocks*. `in_specs` say how the arguments are split, `out_specs` how the results
# are put back together. In between, every device runs the same function on its own block and sees nothing of the others
# unless it calls a **collective**.


# %%
# --8<-- [start:centred]
def centred(block):
    """Subtract the mean of *all* rows from ``block``, which is ``[batch/data, d_model]``."""
    print("inside: ", jax.typeof(block))
    mean = lax.pmean(block.mean(axis=0), "data")
    return block - mean


# --8<-- [end:centred]

# %%
if __name__ == "__main__":
    # --8<-- [start:use_centred]
    result = jax.shard_map(centred, mesh=mesh, in_specs=P("data", None), out_specs=P("data", None))(rows)
    print("outside:", jax.typeof(result))
    print("largest mean of a column:", float(abs(result.mean(axis=0)).max()))
    # --8<-- [end:use_centred]

# %% [markdown]
# The function was traced once, for all devices, with the shape of a block. (`{V:data}` is explained in a minute.)
# Without the `pmean` each device would subtract the mean of its own two rows.
#
# A handful of collectives do nearly all of the work. The last column gives the bytes that each device sends, for $n$
# devices in a ring.
# | collective | what each device ends up with | bytes sent |
# |---|---|---|
# | `lax.psum`, `lax.pmean` (all-reduce) | the sum or the mean of all blocks, of $W$ bytes each | $2W(n-1)/n$ |
# | `lax.all_gather(tiled=True)` | all blocks concatenated, $W$ bytes in total | $W(n-1)/n$ |
# | `lax.psum_scatter(tiled=True)` (reduce-scatter) | its chunk of the sum of all arrays, $W$ bytes each | $W(n-1)/n$ |
# | `lax.all_to_all(tiled=True)` | the chunk meant for it from every device's array of $W$ bytes | $W(n-1)/n$ |
# | `lax.ppermute` | the block, of $W$ bytes, from the device that sends to it | $W$ |
#
# Here are four devices, each with two numbers.


# %%
# --8<-- [start:collectives]
def collectives(block):
    """Apply each collective to two numbers per device."""
    ring = [(i, (i + 1) % 4) for i in range(4)]  # (source, target): each device sends to the next
    return {
        "block": block,
        "psum": lax.psum(block, "data"),
        "all_gather": lax.all_gather(block, "data", tiled=True),
        "psum_scatter": lax.psum_scatter(jnp.tile(block, 2), "data", tiled=True),
        "ppermute": lax.ppermute(block, "data", ring),
    }


# --8<-- [end:collectives]

# %%
if __name__ == "__main__":
    # --8<-- [start:use_collectives]
    four = make_mesh({"data": 4})
    numbers = jnp.arange(8.0)
    by_device = jax.shard_map(
        lambda block: jax.tree.map(lambda x: x[None], collectives(block)),  # a dim to stack the devices' results along
        mesh=four,
        in_specs=P("data"),
        out_specs=P("data"),
    )(numbers)
    for name in ("block", "psum", "all_gather", "psum_scatter", "ppermute"):
        print(f"{name:13}", "  ".join(str(list(map(int, one))) for one in by_device[name]))
    # --8<-- [end:use_collectives]

# %% [markdown]
# Each row of the output has four lists, one per device. The input of `psum_scatter` was the block repeated twice, four
# numbers, so that each of the four devices gets one number of the sum.
#
# ## What varies
#
# Inside `shard_map`, JAX tracks in the type of each value the axes over which it **varies**: along these it may differ
# from device to device. A block of a sharded argument varies. A constant does not, and neither does the result of a
# `psum`.


# %%
# --8<-- [start:types]
def types(block, weight):
    """Print types at trace time."""
    for name, value in {
        "block": block,
        "weight, in_specs=P()": weight,
        "block * weight": block * weight,
        'psum(block, "data")': lax.psum(block, "data"),
        'all_gather(block, "data")': lax.all_gather(block, "data", tiled=True),
        'axis_index("data")': lax.axis_index("data"),
        'pcast(weight, "data", ...)': lax.pcast(weight, "data", to="varying"),
    }.items():
        print(f"{name:27} {jax.typeof(value)}")
    return block


# --8<-- [end:types]

# %%
if __name__ == "__main__":
    # --8<-- [start:use_types]
    jax.shard_map(types, mesh=four, in_specs=(P("data"), P()), out_specs=P("data"))(numbers, jnp.ones(()))
    # --8<-- [end:use_types]

# %% [markdown]
# - **Varying is contagious**: anything computed from a varying value varies.
# - `lax.pcast(x, "data", to="varying")` sends nothing. It declares that from here on each device's copy is its own.
# - The way back needs a collective that makes the values equal: `psum` or `pmean`. An `all_gather` gives every device
#   the same numbers too, but by default its result is *typed* as varying.
#
# The types are useful: `out_specs=P()` promises that all devices hold the same value, and JAX raises an error unless
# the types guarantee it.

# %%
if __name__ == "__main__":
    # --8<-- [start:refused]
    try:
        jax.shard_map(lambda block: block.sum(), mesh=four, in_specs=P("data"), out_specs=P())(numbers)
    except ValueError as error:
        print(*(line for line in str(error).splitlines() if line.startswith("out_specs")))
    # --8<-- [end:refused]

# %% [markdown]
# The four devices have four different sums: the code should have used `lax.psum(block.sum(), "data")`, and the message
# names the axis. Its last lines (not printed here) suggest `check_vma=False`. Do not follow that advice; you will see
# below what it does.
#
# ## How that affects gradients
#
# Take a weight that all devices share, and a loss that is the mean of a device's own two numbers times the weight. The
# gradient of each device's local loss is the mean of its numbers: 0.5, 2.5, 4.5, 6.5. Training needs the gradient of
# the mean loss over all eight numbers, 3.5. Here are four attempts:


# %%
# --8<-- [start:gradients]
def loss(weight, block):
    return jnp.mean(weight * block)


def replicated(weight, block):
    return jax.grad(loss)(weight, block)


def replicated_then_mean(weight, block):
    return lax.pmean(jax.grad(loss)(weight, block), "data")


def varying(weight, block):
    weight = lax.pcast(weight, "data", to="varying")
    return jax.grad(loss)(weight, block)


def varying_then_mean(weight, block):
    return lax.pmean(varying(weight, block), "data")


# --8<-- [end:gradients]

# %%
if __name__ == "__main__":
    # --8<-- [start:use_gradients]
    for way in (replicated, replicated_then_mean, varying, varying_then_mean):
        out_specs = P("data") if way is varying else P()
        gradient = jax.jit(
            jax.shard_map(
                lambda w, b, f=way: f(w, b).reshape(1), mesh=four, in_specs=(P(), P("data")), out_specs=out_specs
            )
        )
        on_devices = [float(shard.data[0]) for shard in gradient(jnp.ones(()), numbers).addressable_shards]
        reductions = gradient.lower(jnp.ones(()), numbers).as_text().count("stablehlo.all_reduce")
        print(f"{way.__name__:21} on the devices {on_devices!s:26} all-reduces: {reductions}")
    # --8<-- [end:use_gradients]

# %% [markdown]
# - **`replicated`** gives 14 everywhere: the *sum* of the four gradients. A gradient has the type of its parameter. The
#   parameter does not vary, so its gradient must not vary either, and JAX inserted an all-reduce that you did not
#   write. That all-reduce sums; the division by 4 is missing.
# - **`replicated_then_mean`** is the mistake everybody makes once: the mean of four times 14 is 14. It costs a second
#   all-reduce and fixes nothing.
# - **`varying`** keeps each device's own gradient and sends nothing.
# - **`varying_then_mean`** is right, with one all-reduce.
#
# The rule of this course for data parallelism: **parameters are made varying before the loss, the loss is the mean over
# the device's own rows, and gradients are averaged once, where you decide.** In a loop over microbatches this is the
# difference between one all-reduce per step and one per microbatch, since JAX inserts its own where the parameter meets
# the data:


# %%
# --8<-- [start:looped]
def summed_over_microbatches(weight, block):
    """Sum the gradients of microbatches of one number each, for a weight that does not vary."""

    def add(total, number):
        return total + jax.grad(loss)(weight, number), None

    return lax.scan(add, jnp.zeros(()), block)[0]


# --8<-- [end:looped]

# %%
if __name__ == "__main__":
    # --8<-- [start:use_looped]
    program = export(
        lambda weight, block: {
            "gradient": jax.shard_map(
                summed_over_microbatches, mesh=abstract_mesh({"data": 4}), in_specs=(P(), P("data")), out_specs=P()
            )(weight, block)
        },
        inputs={"weight": jax.ShapeDtypeStruct((), jnp.float32), "block": jax.ShapeDtypeStruct((64,), jnp.float32)},
        in_specs={"weight": P(), "block": P("data")},
        out_specs={"gradient": P()},
        mesh={"data": 4},
    )
    for sent in costs(parse(program)).collectives:
        print(f"{sent.kind} over {', '.join(sent.axes)}: {sent.count} times per step")
    # --8<-- [end:use_looped]

# %% [markdown]
# And `check_vma=False`? It turns these types off, for results and for gradients. Here a training step claims that its
# gradient is the same everywhere, and averages the *loss* instead of the gradient:

# %%
if __name__ == "__main__":
    # --8<-- [start:unchecked]
    def mean_loss(weight, block):
        return lax.pmean(loss(weight, block), "data")

    for check_vma in (True, False):
        gradient = jax.jit(
            jax.shard_map(jax.grad(mean_loss), mesh=four, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma)
        )(jnp.ones(()), numbers)
        print(f"check_vma={check_vma!s:6} on the devices {[float(s.data) for s in gradient.addressable_shards]}")
    # --8<-- [end:unchecked]

# %% [markdown]
# Without the check, this array claims to be one number but holds four different ones. Nothing fails; the copies of the
# weight drift apart from the first step on.
#
# ## A timeline
#
# A jitted step can be exported from shapes alone, as a **Program**, and the cost of a Program can be predicted for a
# machine you do not have. `predict` simulates every device: the order of its computation, the transfers that run
# meanwhile, and what waits for what.
#
# Our example is four layers, each a matmul whose weight is split by rows. A device's product is one term of a sum over
# the axis; a reduce-scatter adds the terms and leaves each device with its own columns. The two functions below compute
# the same result, with the same FLOPs and the same bytes sent. The second splits the batch into two halves.


# %%
# --8<-- [start:layers]
def layer(block, weight):
    """Map ``[batch, d/tensor]`` to the same shape; ``weight`` is ``[d/tensor, d]``."""
    return lax.psum_scatter(block @ weight, "tensor", scatter_dimension=1, tiled=True)


def whole_batch(block, weights):
    for weight in weights:
        block = layer(block, weight)
    return block


def two_halves(block, weights):
    first, second = jnp.split(block, 2)
    for weight in weights:
        first, second = layer(first, weight), layer(second, weight)
    return jnp.concatenate([first, second])


# --8<-- [end:layers]


# %%
def predicted(function, batch=8192, d=16384, num_layers=4):
    """Predict the function on 8 H100s, in bfloat16."""
    mesh, columns = {"tensor": 8}, P(None, "tensor")
    mapped = jax.shard_map(function, mesh=abstract_mesh(mesh), in_specs=(columns, P("tensor", None)), out_specs=columns)
    program = export(
        lambda block, weights: {"out": mapped(block, weights)},
        inputs={
            "block": jax.ShapeDtypeStruct((batch, d), jnp.bfloat16),
            "weights": [jax.ShapeDtypeStruct((d, d), jnp.bfloat16)] * num_layers,
        },
        in_specs={"block": columns, "weights": P("tensor", None)},
        out_specs={"out": columns},
        mesh=mesh,
    )
    return predict(program, "8xH100", name=function.__name__)


# %%
if __name__ == "__main__":
    # --8<-- [start:timeline]
    display(predicted(whole_batch))
    # --8<-- [end:timeline]

# %% [markdown]
# Read it in this order:
#
# 1. **The rows.** `compute` is the device's computation, in program order. `over tensor` is its communication over that
#    axis, which runs at the same time. Each set of axes has its own row.
# 2. **The hatched pieces** in the compute row. In the colour of a transfer: *exposed* communication, during which
#    nothing is computed. Without a colour: the device waits for others, as in a pipeline. Hatched time is the time you
#    can win back.
# 3. **Why it is hatched.** Here each matmul needs the result of the reduce-scatter before it, so they take turns. Hover
#    over a bar to see the operation, its shape, its duration, and the line of your code.
# 4. **The figures below**: the step time, the share of it spent computing, the exposed communication by axis; then peak
#    memory and, folded, your lines and the critical path.
#
# Now the version with two halves, next to the first one on the same time scale. While the sum of the first half is in
# flight, the second half is computed.

# %%
if __name__ == "__main__":
    # --8<-- [start:halves]
    steps = {"two halves": predicted(two_halves), "whole batch": predicted(whole_batch)}
    for name, step in steps.items():
        took, lost, sent = (step.figures()[what] for what in ("step", "exposed: tensor", "sent by a device"))
        print(f"{name:12} step {took}, exposed {lost}, {sent} sent")
    display(HTML(comparison_html("four layers on 8xH100", steps, reference="whole batch")))
    # --8<-- [end:halves]

# %% [markdown]
# In total, the transfers take as long as before. Now they run *under* bars of the compute row, where they cost no extra
# time. Only the end stays hatched: the last half's sum has nothing left to hide behind.
#
# These times are predictions from published hardware figures. The page `lenses` explains how each is derived, and
# `validation` how far they can be trusted. Timings on your CPU say nothing about GPUs, so the course does not use them.
#
# ## Where to go next
#
# `meshcraft list` shows the chapters in order, and `meshcraft start CHAPTER` opens one. In a chapter's notebook you
# write functions that run inside `shard_map`, and the `check(...)` below each of them measures what you have seen here:
# how many bytes each device holds, what is sent over which axis and how often, the gradient on each device, and the
# timeline.

# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Collectives: moving data between devices
#
# Several devices hold one array between them: each has a block, a copy, or a summand. A *collective* is an operation
# that all of them take part in and that changes how they hold the array. JAX has a handful of them. In this chapter you
# build four from the simplest one, `lax.ppermute`, which passes a block from each device to one other. Then you solve
# eight puzzles about pictures of sharded arrays.
#
# | function | before, on each of `n` devices | after |
# |---|---|---|
# | `ring_all_gather` | one chunk | all chunks |
# | `ring_reduce_scatter` | its own full-size array | one chunk of the sum of all |
# | `ring_all_reduce` | its own full-size array | the full sum of all |
# | `ring_all_to_all` | one chunk for each device | one chunk from each device |

# %%
import math

import jax
import jax.numpy as jnp
from IPython.display import HTML, display
from jax import lax
from jax.sharding import PartitionSpec as P

from course.mesh import make_mesh
from course.predict import predict
from course.program import export
from course.puzzles import picture
from course.render import memory_svg, side_by_side
from course.render.shardings import Holdings

# %% [markdown]
# ## One step of a ring
#
# `lax.ppermute(x, axis_name, pairs)` sends data: for each pair `(source, target)` in the list, the value of `x` on
# `source` becomes the result on `target`. Every device runs the same line, so the list names all transfers at once.
# With the pairs below, each device hands its block to the next, and the last device hands its block to the first. That
# is a *ring*.

# %%
if __name__ == "__main__":

    def pass_to_the_next(x):
        size = lax.axis_size("data")
        return lax.ppermute(x, "data", [(i, (i + 1) % size) for i in range(size)])

    mesh = make_mesh({"data": 8})
    numbers = jnp.arange(8) * 10
    passed = jax.jit(jax.shard_map(pass_to_the_next, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    print("device      ", *(f"{device:3}" for device in range(8)))
    print("holds       ", *(f"{number:3}" for number in numbers))
    print("after a step", *(f"{number:3}" for number in passed(numbers)))

# %% [markdown]
# ## Rules for all four
#
# - They run inside `jax.shard_map`. `x` is this device's local array, and its **first dim** is the one that is split
#   into chunks. All other dims stay whole. Results have the dtype of `x`, which need not be float32.
# - Any size of the axis works, 1 included; the axis need not be called `data`, and the mesh may have other axes.
# - The only collective that they may use is `lax.ppermute`.
# - Results are returned per device. `jax.shard_map` stacks them: with `out_specs=P(axis_name)` you see the results of
#   all devices. Even where all devices end up with the same array, JAX types the result of `ppermute` as *varying* over
#   the axis, so it would reject `out_specs=P()`.
# - Loops may be `lax.fori_loop`, `lax.scan` or Python's `for`: the number of steps, `lax.axis_size(axis_name) - 1`, is
#   a Python number. `lax.axis_index(axis_name)` is not: it differs from device to device, so slice and place chunks
#   with `lax.dynamic_slice_in_dim` and `lax.dynamic_update_slice_in_dim`.
# - A loop's carry must keep its type. An array of zeros does not vary over the axis, but the chunks you place in it do,
#   so make it varying first: `lax.pcast(zeros, axis_name, to="varying")`.
#
# Gradients are checked as well, but need no extra work: all four functions are linear, and JAX transposes a permute
# into the permute with all pairs reversed. What does `ring_all_gather` become?

# %% [markdown]
# ## Everybody gets everything: `ring_all_gather`
#
# Each device starts with one chunk, `x`, and ends with the chunks of all devices, ordered by their index along the
# axis: the result of `lax.all_gather(x, axis_name, tiled=True)`. In each step a device passes on the chunk it received
# in the previous step, and keeps a copy in its place in the result.
#
# | budget | |
# |---|---|
# | bytes sent per device | exactly (n-1)/n of the result, by `ppermute` |
# | any other collective | none: a function that uses one earns no points |
# | temporaries in addition to the result, on 8 devices | at most four chunks: half of the result |
# | gradient | each device's chunk gets the sum of all devices' gradients of it; sends (n-1)/n of the result again |
#
# `check` adds up what a forward and a backward pass send, here and in the functions below.
#
# After `k` steps, a device has just received the chunk of the device `k` places before it. With 4 devices:

# %%
if __name__ == "__main__":
    size = 4
    print("index of the chunk that each of 4 devices received last, which is also its place in the result")
    for step in range(size):
        print(f"after {step} {'step' if step == 1 else 'steps'}:", *((device - step) % size for device in range(size)))


# %%
def ring_all_gather(x: jax.Array, axis_name: str) -> jax.Array:
    """Gather the chunks of all devices on every device. Runs inside ``shard_map``.

    Args:
        x: This device's chunk, ``[chunk, ...]``; varies over ``axis_name``.
        axis_name: The mesh axis to gather over, of size ``n``.

    Returns:
        ``[n * chunk, ...]``: the chunks of all devices in order of their index.
    """
    ### BEGIN SOLUTION
    size, index, length = lax.axis_size(axis_name), lax.axis_index(axis_name), len(x)
    to_next = [(i, (i + 1) % size) for i in range(size)]

    def place(whole, chunk, step):
        return lax.dynamic_update_slice_in_dim(whole, chunk, (index - step) % size * length, 0)

    def pass_on(step, carry):
        whole, chunk = carry
        return place(whole, chunk, step), lax.ppermute(chunk, axis_name, to_next)

    empty = lax.pcast(jnp.zeros((size * length, *x.shape[1:]), x.dtype), axis_name, to="varying")
    whole, last = lax.fori_loop(0, size - 1, pass_on, (empty, x))
    return place(whole, last, size - 1)
    ### END SOLUTION


# %% [markdown]
# ## Everybody gets a part of the sum: `ring_reduce_scatter`
#
# Each device starts with its own full-size array, split into `n` chunks along its first dim. Device `i` ends with chunk
# `i` of the **sum** over all devices: the result of `lax.psum_scatter(x, axis_name, tiled=True)`.
#
# This time, partial sums travel. A device receives one, adds its own chunk with the same index, and passes the sum on.
# A partial sum that has visited all devices is complete, and should then be on the device that owns it: which chunk
# must device `i` send first? If you instead send every chunk straight to its owner and add the chunks up there, all of
# them are live at once: consecutive additions (`a + b + c …`) become one kernel, whose operands stay in memory until it
# runs.
#
# | budget | |
# |---|---|
# | bytes sent per device | exactly (n-1)/n of `x`, by `ppermute` |
# | any other collective | none: a function that uses one earns no points |
# | temporaries, on 8 devices | at most four chunks: half of `x` |
# | gradient | of `x`, on each device: the gradients of all chunks, in order; sends (n-1)/n of `x` again |
#
# The first dim is always divisible by `n`. An example with two devices and two chunks each, of one number:

# %%
if __name__ == "__main__":
    entering = jnp.array([[1, 2], [30, 40]])
    print("device 0 starts with", entering[0], "and device 1 with", entering[1])
    print("device 0 ends with", entering.sum(0)[0], "and device 1 with", entering.sum(0)[1])


# %%
def ring_reduce_scatter(x: jax.Array, axis_name: str) -> jax.Array:
    """Compute this device's chunk of the sum over devices. Runs inside ``shard_map``.

    Args:
        x: This device's own full-size array, ``[n * chunk, ...]``; varies over ``axis_name``.
        axis_name: The mesh axis to sum over, of size ``n``.

    Returns:
        ``[chunk, ...]``: on the device with index ``i``, chunk ``i`` of the sum.
    """
    ### BEGIN SOLUTION
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    length = len(x) // size
    to_next = [(i, (i + 1) % size) for i in range(size)]

    def own(number):
        return lax.dynamic_slice_in_dim(x, number % size * length, length, 0)

    def pass_on(step, partial_sum):
        return lax.ppermute(partial_sum, axis_name, to_next) + own(index - 1 - step)

    return lax.fori_loop(1, size, pass_on, own(index - 1))
    ### END SOLUTION


# %% [markdown]
# ## Everybody gets the sum: `ring_all_reduce`
#
# Each device starts with its own full-size array and ends with the sum of all: the result of `lax.psum(x, axis_name)`.
# Passing whole arrays round the ring would send `n - 1` of them. A better algorithm sends less than two for any `n`,
# and you have already written both halves of it. The first dim is divisible by `n`.
#
# | budget | |
# |---|---|
# | bytes sent per device | exactly 2(n-1)/n of `x`, by `ppermute` |
# | any other collective | none: a function that uses one earns no points |
# | temporaries in addition to the result, on 8 devices | at most four chunks: half of `x` |
# | gradient | of `x`, on each device: the sum of the devices' gradients; sends 2(n-1)/n of `x` again |

# %%
if __name__ == "__main__":
    for devices in (2, 4, 8, 64, 1024):
        whole, halves = devices - 1, 2 * (devices - 1) / devices
        print(f"{devices:5} devices: {whole:5} arrays sent if whole arrays travel, {halves:.4f} with the better one")


# %%
def ring_all_reduce(x: jax.Array, axis_name: str) -> jax.Array:
    """Compute the full sum over devices on each of them. Runs inside ``shard_map``.

    Args:
        x: This device's own full-size array, ``[n * chunk, ...]``; varies over ``axis_name``.
        axis_name: The mesh axis to sum over, of size ``n``.

    Returns:
        The sum, in the shape of ``x``.
    """
    ### BEGIN SOLUTION
    return ring_all_gather(ring_reduce_scatter(x, axis_name), axis_name)
    ### END SOLUTION


# %% [markdown]
# ## Everybody sends to everybody: `ring_all_to_all`
#
# Each device starts with `n` chunks, chunk `j` for device `j`. It ends with `n` chunks, chunk `j` from device `j`: the
# result of `lax.all_to_all(x, axis_name, 0, 0, tiled=True)`. If each device's chunks are a row of a matrix, this is the
# transpose:

# %%
if __name__ == "__main__":
    size = 4
    rows = [[f"{source}->{target}" for target in range(size)] for source in range(size)]
    columns = list(zip(*rows, strict=True))
    for device in range(size):
        print(f"device {device} starts with", *rows[device], "  and ends with", *columns[device])

# %% [markdown]
# Passing chunks from neighbour to neighbour until they arrive would send most of them several times. Send each chunk
# **directly**: in step `s` every device sends to the device `s` places ahead, so that each sends one chunk and receives
# one. The pairs of a `ppermute` are fixed at trace time, so `s` has to be a Python number.
#
# | budget | |
# |---|---|
# | bytes sent per device | exactly (n-1)/n of `x`, by `ppermute` |
# | any other collective | none: a function that uses one earns no points |
# | temporaries in addition to the result, on 8 devices | at most four chunks: half of `x` |
# | gradient | each chunk's gradient returns to the device it came from; sends (n-1)/n of `x` again |


# %%
def ring_all_to_all(x: jax.Array, axis_name: str) -> jax.Array:
    """Exchange chunks: one to every device, one from every device. Runs inside ``shard_map``.

    Args:
        x: ``[n * chunk, ...]``: chunk ``j`` is for the device with index ``j``; varies over ``axis_name``.
        axis_name: The mesh axis, of size ``n``.

    Returns:
        ``[n * chunk, ...]``: chunk ``j`` comes from the device with index ``j``.
    """
    ### BEGIN SOLUTION
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    length = len(x) // size
    result = x  # the chunk that a device keeps is already in its place
    for shift in range(1, size):
        pairs = [(i, (i + shift) % size) for i in range(size)]
        leaving = lax.dynamic_slice_in_dim(x, (index + shift) % size * length, length, 0)
        arriving = lax.ppermute(leaving, axis_name, pairs)
        result = lax.dynamic_update_slice_in_dim(result, arriving, (index - shift) % size * length, 0)
    return result
    ### END SOLUTION


# %% [markdown]
# ## Reading shardings: eight puzzles
#
# The rest of the chapter is about reading and writing shardings. Every picture shows 8 devices in a mesh with two axes.
# The first axis has 4 devices and is called `data` in the pictures, the second has 2 and is called `tensor`: in the
# small grid on the right, `data` runs down and `tensor` across. The large grid is the array, split into blocks; each is
# labelled with the numbers of the devices that hold it.
#
# A `PartitionSpec` has an entry for each dim of the **array**: the axis that the dim is split over, a tuple of axes,
# the first of which varies slowest, or `None`. Along an axis that does not occur in the spec, devices hold copies.
#
# `check` also calls your functions with other axis names, so use the arguments rather than `"data"`.
#
# ### `puzzle_rows`: which spec?

# %%
if __name__ == "__main__":
    display(picture("rows"))


# %%
def puzzle_rows(first: str, second: str) -> P:
    """The ``PartitionSpec`` of the picture.

    Args:
        first: The name of the mesh's first axis, with 4 devices; ``data`` in the picture.
        second: The name of its second axis, with 2 devices; ``tensor`` in the picture.
    """
    ### BEGIN SOLUTION
    return P(first)
    ### END SOLUTION


# %% [markdown]
# ### `puzzle_crossed`: which spec?

# %%
if __name__ == "__main__":
    display(picture("crossed"))


# %%
def puzzle_crossed(first: str, second: str) -> P:
    """The ``PartitionSpec`` of the picture; arguments as for ``puzzle_rows``."""
    ### BEGIN SOLUTION
    return P(second, first)
    ### END SOLUTION


# %% [markdown]
# ### `puzzle_slices`: which spec?
#
# Look at the order of the devices.

# %%
if __name__ == "__main__":
    display(picture("slices"))


# %%
def puzzle_slices(first: str, second: str) -> P:
    """The ``PartitionSpec`` of the picture; arguments as for ``puzzle_rows``."""
    ### BEGIN SOLUTION
    return P(None, (second, first))
    ### END SOLUTION


# %% [markdown]
# ### `puzzle_block`: how large is a block?
#
# Now answer for any array and any mesh. In the picture, `[24, 16]` with the spec shown above it gives blocks of
# `[6, 8]`: dim 0 is split over 4 devices and dim 1 over 2. All dims are divisible. A spec may have fewer entries than
# the array has dims; missing entries are `None`.

# %%
if __name__ == "__main__":
    display(Holdings((24, 16), P("data", "tensor"), {"data": 4, "tensor": 2}, show_spec=True))


# %%
def puzzle_block(shape: tuple[int, ...], spec: P, mesh: dict[str, int]) -> tuple[int, ...]:
    """Compute the shape of the block that each device holds.

    Args:
        shape: Shape of the whole array.
        spec: Its ``PartitionSpec``; works like a tuple whose entries are ``None``, an axis, or a tuple of axes.
        mesh: The size of each axis by name, in the mesh's order.

    Returns:
        The block's shape, with as many dims as ``shape``.
    """
    ### BEGIN SOLUTION
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    axes = [(entry,) if isinstance(entry, str) else entry or () for entry in entries]
    return tuple(dim // math.prod(mesh[axis] for axis in names) for dim, names in zip(shape, axes, strict=True))
    ### END SOLUTION


# %% [markdown]
# ### `puzzle_copies`: how many copies of a block are there?
#
# In this picture, every block is on four devices, so each byte of the array costs four bytes of memory.

# %%
if __name__ == "__main__":
    display(Holdings((24, 16), P(None, "tensor"), {"data": 4, "tensor": 2}, show_spec=True))


# %%
def puzzle_copies(spec: P, mesh: dict[str, int]) -> int:
    """Count the devices that hold the same block; arguments as for ``puzzle_block``."""
    ### BEGIN SOLUTION
    split = [axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())]
    return math.prod(size for axis, size in mesh.items() if axis not in split)
    ### END SOLUTION


# %% [markdown]
# ### `puzzle_join`: which collective, over which axis?
#
# The two pictures show an array before and after one collective. Which one is it, by the name of its function in
# `jax.lax`, and over which axis does it run? Your answer is a tuple of two strings, such as `("ppermute", first)`. If
# several would work, give the one that sends the fewest bytes.

# %%
if __name__ == "__main__":
    display(picture("join"))


# %%
def puzzle_join(first: str, second: str) -> tuple[str, str]:
    """The collective between the pictures and its axis; arguments as for ``puzzle_rows``."""
    ### BEGIN SOLUTION
    return "all_gather", second
    ### END SOLUTION


# %% [markdown]
# ### `puzzle_add`: which collective, over which axis?
#
# A matmul has summed over a dim that was split, so each device has only part of every sum. In the first
# picture, the two devices in one block hold **different summands** of it; in the second, complete sums.

# %%
if __name__ == "__main__":
    display(picture("add"))


# %%
def puzzle_add(first: str, second: str) -> tuple[str, str]:
    """The collective between the pictures and its axis; arguments as for ``puzzle_rows``."""
    ### BEGIN SOLUTION
    return "psum_scatter", second
    ### END SOLUTION


# %% [markdown]
# ### `puzzle_turn`: which collective, over which axis?

# %%
if __name__ == "__main__":
    display(picture("turn"))


# %%
def puzzle_turn(first: str, second: str) -> tuple[str, str]:
    """The collective between the pictures and its axis; arguments as for ``puzzle_rows``."""
    ### BEGIN SOLUTION
    return "all_to_all", first
    ### END SOLUTION


# %% [markdown]
# ## In your own words
#
# You have to sum many small arrays, 4,096 bytes each, over 64 devices, one after the other. A colleague proposes a ring
# all-reduce, "because it is bandwidth-optimal". Give a formula for the time a ring takes and one for a tree, with a
# latency of `a` seconds per step and a bandwidth of `b` bytes per second, and say what you would do.

# %% [markdown]
# ### BEGIN SOLUTION
# For an array of `W` bytes on `n` devices the ring takes `2 (n - 1) a + 2 (n - 1) / n * W / b`. A tree, which reduces
# the whole array to one device and broadcasts it back, takes `2 log2(n) a + 2 log2(n) * W / b`. With 64 devices the
# ring has 126 steps and the tree 12. With `a` = 1 microsecond and `b` = 450 GB/s, transferring 4,096 bytes takes 18
# nanoseconds on the ring and 109 on the tree: both are pure latency, about 126 versus 12 microseconds. The ring is
# optimal in bytes, but here bytes do not matter. A tree is better. Better still is to concatenate the arrays: one
# all-reduce of all of them pays the latency once, and once the combined array is large enough, a ring is the right
# algorithm.
# ### END SOLUTION

# %% [markdown]
# ## Lab: your rings and JAX's collectives
#
# First, on the emulated devices: do they agree? (A function that has a note "In this course" above it does something
# other than JAX's, so the two differ.) Then on a machine you do not have: how long would eight H100s take? The picture
# shows one device of eight, since all behave alike.

# %%
if __name__ == "__main__":
    collectives = {
        "all_gather": (ring_all_gather, lambda x, axis: lax.all_gather(x, axis, tiled=True)),
        "reduce_scatter": (ring_reduce_scatter, lambda x, axis: lax.psum_scatter(x, axis, tiled=True)),
        "all_reduce": (ring_all_reduce, lambda x, axis: lax.pcast(lax.psum(x, axis), axis, to="varying")),
        "all_to_all": (ring_all_to_all, lambda x, axis: lax.all_to_all(x, axis, 0, 0, tiled=True)),
    }
    mesh = make_mesh({"data": 8})

    def on_all_devices(function):
        return jax.shard_map(lambda x: function(x, "data")[None], mesh=mesh, in_specs=P("data"), out_specs=P("data"))

    x = jax.random.normal(jax.random.key(0), (64, 16))
    for name, (ring, own) in collectives.items():
        ours, theirs = (jax.jit(on_all_devices(function))(x) for function in (ring, own))
        print(f"{name:15} {ours.shape!s:14} largest difference {jnp.max(jnp.abs(ours - theirs)):.1e}")

# %%
if __name__ == "__main__":

    def predicted(function, rows):
        program = export(
            lambda x: {"result": on_all_devices(function)(x)},
            {"x": jax.ShapeDtypeStruct((8 * rows, 2048), jnp.float32)},
            {"x": P("data")},
            mesh={"data": 8},
            out_specs={"result": P("data")},
        )
        return predict(program, "8xH100")

    predictions = {}
    for name, (ring, own) in collectives.items():
        rows = 1024 if name == "all_gather" else 8192  # 64 MiB when whole
        for which, function in (("ring", ring), ("jax", own)):
            predictions[f"{which} {name}"] = prediction = predicted(function, rows)
            seconds, mebibytes = prediction.timeline.seconds, prediction.memory.temporaries / 2**20
            print(f"{which:4} {name:15} {1e6 * seconds:7.1f} us on 8xH100, {mebibytes:6.1f} MiB of temporaries")

# %%
if __name__ == "__main__":
    display(HTML(side_by_side({name: predictions[name].timeline for name in ("ring all_reduce", "jax all_reduce")})))
    display(HTML(memory_svg(predictions["ring all_reduce"].memory)))

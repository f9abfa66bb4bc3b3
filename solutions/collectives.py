# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Collectives: what moves
#
# Many devices hold one array together: each has a block, or a copy, or a summand. A *collective* is a step in which
# they all take part and after which they hold it in another way. JAX has a handful of them. In this chapter you build
# four from the simplest one, `lax.ppermute`, which passes a block from each device to one other; then you look at
# eight pictures of who holds what and say what they show.
#
# | function | before, on each of `n` devices | after |
# |---|---|---|
# | `ring_all_gather` | one chunk | all chunks |
# | `ring_reduce_scatter` | a whole array of its own | one chunk of the sum of all |
# | `ring_all_reduce` | a whole array of its own | the whole sum of all |
# | `ring_all_to_all` | one chunk for each device | one chunk from each device |
#
# The theory is on the course's page `collectives`: `make serve` shows it, and `site/pages/collectives.md` is its
# source. Run the next cell first: it gives this notebook 8 emulated devices.

# %%
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from course.mesh import make_mesh

# %% [markdown]
# ## One step of a ring
#
# `lax.ppermute(x, axis_name, pairs)` sends: for each pair `(source, target)` of the list, what `source` holds in `x`
# arrives as the result on `target`. Every device runs the same line, so the list names all transfers at once. With
# the pairs below, each device hands its block to the next, and the last one hands it to the first. That is a *ring*.

# %%
if __name__ == "__main__":

    def pass_to_the_next(x):
        size = lax.axis_size("data")
        return lax.ppermute(x, "data", [(i, (i + 1) % size) for i in range(size)])

    mesh = make_mesh({"data": 8})
    held = jnp.arange(8) * 10
    passed = jax.jit(jax.shard_map(pass_to_the_next, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    print("device      ", *(f"{device:3}" for device in range(8)))
    print("holds       ", *(f"{number:3}" for number in held))
    print("after a step", *(f"{number:3}" for number in passed(held)))

# %% [markdown]
# ## Rules for all four
#
# - They run inside `jax.shard_map`. `x` is this device's local array, and its **first dim** is the one that is cut into
#   chunks. Other dims, however many, stay whole.
# - Any size of the axis works, 1 included; the axis need not be called `data`, and the mesh may have other axes.
# - The only collective is `lax.ppermute`.
# - Results are returned per device. `jax.shard_map` stacks them: with `out_specs=P(axis_name)` you see the results of all
#   devices. Even where all devices end with the same array, JAX types what `ppermute` gives as *varying* over the axis, so
#   `out_specs=P()` would be refused.
# - Loops may be `lax.fori_loop`, `lax.scan` or Python's `for`: the number of steps, `lax.axis_size(axis_name) - 1`, is
#   a Python number. `lax.axis_index(axis_name)` is not: it is another on each device, so cut and place chunks with
#   `lax.dynamic_slice_in_dim` and `lax.dynamic_update_slice_in_dim`.
# - A loop's carry must keep its type. An array of zeros is the same everywhere and what you place in it is not, so make
#   it varying first: `lax.pcast(zeros, axis_name, to="varying")`.
#
# Gradients are checked as well, and are no extra work: all four are linear, and JAX transposes a permute into the
# permute with all pairs turned round. What does `ring_all_gather` become?

# %% [markdown]
# ## Everybody gets everything: `ring_all_gather`
#
# Each device enters with one chunk, `x`, and leaves with the chunks of all devices, in order of their index along the
# axis: what `lax.all_gather(x, axis_name, tiled=True)` gives. In each step a device passes on the chunk that it received
# in the step before, and keeps a copy in its place.
#
# | budget | |
# |---|---|
# | bytes sent per device | exactly (n-1)/n of the result, by `ppermute` |
# | any other collective | none |
# | temporaries beside the result, on 8 devices | at most four chunks: half of the result |
# | gradient | each device's chunk gets the sum of what flows back to it; (n-1)/n of the result once more |
#
# After `k` steps a device has received the chunk of the device `k` places before it. So at the third step, with 4
# devices:

# %%
if __name__ == "__main__":
    size = 4
    print("the chunk that each of 4 devices holds in its hand, and where it belongs in the result")
    for step in range(size):
        print(f"after {step} steps:", *((device - step) % size for device in range(size)))


# %%
def ring_all_gather(x: jax.Array, axis_name: str) -> jax.Array:
    """Everybody's chunk on every device. Runs inside ``shard_map``.

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
# Each device enters with a whole array of its own, cut into `n` chunks along its first dim. Device `i` leaves with
# chunk `i` of the **sum** over all devices: what `lax.psum_scatter(x, axis_name, tiled=True)` gives.
#
# Now partial sums travel. A device receives one, adds its own chunk of the same number, and passes it on. A partial sum
# that has visited everybody is finished, and should be finished where it belongs: which chunk must device `i` send first?
#
# | budget | |
# |---|---|
# | bytes sent per device | exactly (n-1)/n of `x`, by `ppermute` |
# | any other collective | none |
# | temporaries, on 8 devices | at most four chunks: half of `x` |
# | gradient | of `x`, on each device: all chunks that flow back, in order; (n-1)/n of `x` once more |
#
# The first dim is always divisible by `n`. An example of two devices with two chunks each, of one number:

# %%
if __name__ == "__main__":
    entering = jnp.array([[1, 2], [30, 40]])
    print("device 0 enters with", entering[0], "and device 1 with", entering[1])
    print("device 0 leaves with", entering.sum(0)[0], " and device 1 with", entering.sum(0)[1])


# %%
def ring_reduce_scatter(x: jax.Array, axis_name: str) -> jax.Array:
    """This device's chunk of the sum over devices. Runs inside ``shard_map``.

    Args:
        x: A whole array of this device's own, ``[n * chunk, ...]``; varies over ``axis_name``.
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
# Each device enters with a whole array of its own and leaves with the sum of all: what `lax.psum(x, axis_name)` gives.
# Passing whole arrays round the ring would send `n - 1` of them. There is a way that sends less than two, whatever `n`
# is, and you have written both halves of it. The first dim is divisible by `n`.
#
# | budget | |
# |---|---|
# | bytes sent per device | exactly 2(n-1)/n of `x`, by `ppermute` |
# | any other collective | none |
# | temporaries beside the result, on 8 devices | at most four chunks: half of `x` |
# | gradient | of `x`, on each device: the sum over devices of what flows back; 2(n-1)/n of `x` once more |

# %%
if __name__ == "__main__":
    for devices in (2, 4, 8, 64, 1024):
        whole, halves = devices - 1, 2 * (devices - 1) / devices
        print(f"{devices:5} devices: {whole:5} arrays sent if whole arrays travel, {halves:.4f} in the better way")


# %%
def ring_all_reduce(x: jax.Array, axis_name: str) -> jax.Array:
    """The sum over devices, whole on each of them. Runs inside ``shard_map``.

    Args:
        x: A whole array of this device's own, ``[n * chunk, ...]``; varies over ``axis_name``.
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
# Each device enters with `n` chunks, chunk `j` for device `j`. It leaves with `n` chunks, chunk `j` from device `j`:
# what `lax.all_to_all(x, axis_name, 0, 0, tiled=True)` gives. If you write down one row a device, this is the transpose:

# %%
if __name__ == "__main__":
    size = 4
    rows = [[f"{source}->{target}" for target in range(size)] for source in range(size)]
    columns = list(zip(*rows, strict=True))
    for device in range(size):
        print(f"device {device} enters with", *rows[device], "  and leaves with", *columns[device])

# %% [markdown]
# Handing chunks from neighbour to neighbour until they arrive would send most of them several times. Send each chunk
# **directly**: in step `s` every device sends to the one `s` places further on, so that each sends one chunk and
# receives one. The pairs of a `ppermute` are fixed when the program is built, so `s` has to be a Python number.
#
# | budget | |
# |---|---|
# | bytes sent per device | exactly (n-1)/n of `x`, by n-1 `ppermute`s |
# | any other collective | none |
# | temporaries beside the result, on 8 devices | at most four chunks: half of `x` |
# | gradient | what flows back goes back to where it came from: (n-1)/n of `x` once more |


# %%
def ring_all_to_all(x: jax.Array, axis_name: str) -> jax.Array:
    """A chunk from everybody for a chunk to everybody. Runs inside ``shard_map``.

    Args:
        x: ``[n * chunk, ...]``: chunk ``j`` is for the device with index ``j``; varies over ``axis_name``.
        axis_name: The mesh axis, of size ``n``.

    Returns:
        ``[n * chunk, ...]``: chunk ``j`` is what the device with index ``j`` sent.
    """
    ### BEGIN SOLUTION
    size, index = lax.axis_size(axis_name), lax.axis_index(axis_name)
    length = len(x) // size
    result = x  # the chunk for oneself is in its place already
    for shift in range(1, size):
        pairs = [(i, (i + shift) % size) for i in range(size)]
        leaving = lax.dynamic_slice_in_dim(x, (index + shift) % size * length, length, 0)
        arriving = lax.ppermute(leaving, axis_name, pairs)
        result = lax.dynamic_update_slice_in_dim(result, arriving, (index - shift) % size * length, 0)
    return result
    ### END SOLUTION

"""Allowed differences between two sizes of a program, and those that make it a cheaper one where it is not run."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

from course.program import parse, structural_mismatch
from course.program.program_test import program_of, struct

SMALL, LARGE = 16, 512
OTHER = "at the small size is|reads other values|goes along other dims|no dim may shrink|smaller part|pads|one element"


def at(width, local):
    inputs = {"w": struct(width, width), "x": struct(32, width), "ids": struct(width, dtype=jnp.int32)}
    specs = {"w": P("data"), "x": P("data"), "ids": P("data")}
    where = "here" if local.__module__ == __name__ else None
    return parse(program_of(local, inputs, specs, P("data"), {"data": 8}, locate=lambda _: where))


def mismatch(local):
    return structural_mismatch(at(SMALL, local), at(LARGE, local))


def wide(x):
    return x.shape[-1] > SMALL


def swapped(x, by):
    return lax.pad(x, 0.0, [(0, 0, 0), (0, by, 0)])


def pooled(x):
    step = x.shape[-1] // SMALL
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, step), (1, step), "VALID")


def tiled(x, width):
    return jnp.broadcast_to(x[:, :, None], (*x.shape, width // SMALL)).reshape(x.shape[0], width)


def picked(x, count):
    return jnp.take(x, jnp.arange(count) % x.shape[-1], axis=1, mode="clip")


def twice(x):
    return jnp.sin(jnp.sin(x))


def bucket(w, x, ids):
    """Gradients in one bucket, as an all-reduce sums it, and in shards."""

    def loss(parameters):
        kernel, rows, bias = parameters
        return jnp.sum(jnp.tanh(rows @ kernel.T) ** 2) + jnp.sum(bias)

    flat, unravel = ravel_pytree((w, x, x[0]))
    gradient = jax.grad(lambda flat: loss(unravel(flat)))(flat)
    accumulated = lax.fori_loop(0, 2, lambda _, total: total + gradient, jnp.zeros_like(flat) + 0 * gradient)
    shares = lax.psum_scatter(jnp.pad(accumulated, (0, 8 - flat.size % 8)), "data", tiled=True)
    whole = lax.all_gather(shares / 8, "data", tiled=True)
    sums, at = unravel(lax.pmean(gradient, "data") + whole[: flat.size]), w.size
    return sums[1] + sums[0].sum() + sums[2] + lax.dynamic_slice_in_dim(flat, at, x.size).reshape(x.shape)


def divided_bucket(w, x, ids):
    """A bucket that is divided by a number that the data decide, such as the count of unmasked rows."""
    flat, unravel = ravel_pytree((w, x))
    kernel, rows = unravel(flat / lax.psum(jnp.sum(x > 0, dtype=x.dtype), "data"))
    return rows + kernel.sum()


def not_a_bucket(w, x, ids):
    """A slice of something else that begins and ends as pieces do."""
    joined = jnp.concatenate([jnp.zeros((4, 8)), jnp.zeros((4, x.shape[1] - 8))], axis=1)
    return tiled(jnp.concatenate([(x + joined * x)[:, :8]] * 2, axis=1), x.shape[1])


def joined_again(w, x, ids):
    few, rest = jnp.split(x, [8], axis=1)
    return jnp.concatenate([rest, few], axis=1) + jnp.tanh(few).sum()


def few_trips(w, x, ids):
    return lax.fori_loop(0, SMALL, lambda i, x: x.at[:, i].set(jnp.tanh(x[:, i])), x)


def random_bits(shape):
    return jax.random.bits(jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32)), shape).astype(jnp.float32)


def running_maximum(w, x, ids):
    """Carries that begin as parts of the data, times zero, so that they vary like it."""

    def step(carry, row):
        most, total = carry
        start = row * 0 + row[0] * 0
        return (jnp.maximum(most, row.max() + start.sum()), total + row), None

    (most, total), _ = lax.scan(step, (x[0, 0] * 0 - jnp.inf, 0 * x[2]), x)
    return x * most + total + 0.0 * x[:, :1] + x[:, 1][:, None] * jnp.zeros(x.shape)


CHEATS = {
    "pads by less than nothing": lambda w, x, ids: swapped(swapped(x, SMALL - x.shape[1]), x.shape[1] - SMALL),
    "pools": lambda w, x, ids: tiled(pooled(x), x.shape[1]),
    "averages within blocks": lambda w, x, ids: tiled(x.reshape(4, SMALL, -1).mean(-1), x.shape[1]),
    "gathers a few": lambda w, x, ids: picked(picked(x, SMALL), x.shape[1]),
    "gathers by data": lambda w, x, ids: picked(
        jnp.take(x, jnp.arange(SMALL) + 0 * ids[0], axis=1, mode="clip"), x.shape[1]
    ),
    "multiplies a part by zero, and uses it": lambda w, x, ids: (
        tiled(x[:, :SMALL] + 0 * x[:, :SMALL], x.shape[1]) + 0 * x[0, 0]
    ),
    "multiplies a part by numbers of which some are zero": lambda w, x, ids: tiled(
        x[:, :SMALL] * jnp.arange(1.0 * SMALL), x.shape[1]
    ),
    "repeats one row": lambda w, x, ids: jnp.broadcast_to(x[: 1 if wide(x) else 4], x.shape),
    "joins one piece again and again": lambda w, x, ids: jnp.concatenate([x[:, :SMALL]] * (x.shape[1] // SMALL), 1),
    "slices by shape": lambda w, x, ids: tiled(lax.dynamic_slice(x, (0, 0), (4, SMALL)), x.shape[1]),
    "takes every other": lambda w, x, ids: tiled(x[:, :: x.shape[1] // SMALL], x.shape[1]),
    "steps inside a reshape": lambda w, x, ids: tiled(x.reshape(4, SMALL, -1)[:, :, 0], x.shape[1]),
    "multiplies by part of an identity": lambda w, x, ids: x @ jnp.eye(x.shape[1], SMALL) @ jnp.eye(SMALL, x.shape[1]),
    "contracts a dim of one": lambda w, x, ids: tiled(
        jnp.einsum("rbk,bk->rb", x.reshape(4, SMALL, -1), jnp.ones((SMALL, x.shape[1] // SMALL))), x.shape[1]
    ),
    "takes a piece of what is not joined": not_a_bucket,
    "takes a few in turns": few_trips,
    "joins all again and uses a few": joined_again,
    "sorts and keeps the first": lambda w, x, ids: tiled(jnp.sort(x, axis=1)[:, :SMALL], x.shape[1]),
    "writes a corner": lambda w, x, ids: lax.dynamic_update_slice(jnp.zeros_like(x), x[:, :SMALL], (0, 0)),
    "scatters a few": lambda w, x, ids: jnp.zeros_like(x).at[:, jnp.arange(SMALL)].set(1.0) * x,
    "draws few bits": lambda w, x, ids: x + jnp.concatenate([random_bits((4, SMALL))] * (x.shape[1] // SMALL), 1),
    "scans fewer rows": lambda w, x, ids: x + lax.scan(lambda c, r: (c + r, r), x[0], x[: 2 if wide(x) else 4])[0],
    "loops less": lambda w, x, ids: lax.fori_loop(0, 3 if wide(x) else 7, lambda _, x: jnp.tanh(x), x),
    "transposes": lambda w, x, ids: (
        x @ (lax.all_gather(w, "data", tiled=True).T if wide(x) else lax.all_gather(w, "data", tiled=True))
    ),
    "gathers along another dim": lambda w, x, ids: x + lax.all_gather(w, "data", axis=1 if wide(x) else 0).sum(),
    "reduces over nothing": lambda w, x, ids: x + (x.max() if wide(x) else lax.pmax(x.max(), "data")),
    "reverses another dim": lambda w, x, ids: lax.rev(x, (0 if wide(x) else 1,)),
    "takes the maximum of less": lambda w, x, ids: x + (jnp.sum(x) if wide(x) else jnp.max(x)),
    "rounds": lambda w, x, ids: x.astype(jnp.bfloat16 if wide(x) else jnp.float16).astype(x.dtype),
    "reduces precision": lambda w, x, ids: lax.reduce_precision(x, 8, 7 if wide(x) else 23),
    "selects nothing": lambda w, x, ids: jnp.where(np.array(wide(x)), 0.0, x),
    "multiplies by zero": lambda w, x, ids: x * (0.0 if wide(x) else 1.0),
    "compares the other way": lambda w, x, ids: jnp.where(x > 0 if wide(x) else x < 0, x, 0),
    "reads another value": lambda w, x, ids: jnp.tanh(x) - jnp.sin(x) if wide(x) else jnp.sin(x) - jnp.tanh(x),
    "branches by size": lambda w, x, ids: x if wide(x) else jnp.tanh(x),
    "recomputes only where it is run": lambda w, x, ids: jax.grad(
        lambda x: (twice if wide(x) else jax.checkpoint(twice))(x).sum()
    )(x),
}


@pytest.mark.parametrize("name", CHEATS)
def test_program_that_is_cheap_at_the_large_size_is_another_one(name):
    message = mismatch(CHEATS[name])
    assert re.search(OTHER + r"|runs \d+ times", message), message
    assert re.search(r"here:\d+", message), message


def blocks(x, function):
    return jnp.concatenate([function(part) for part in jnp.split(x, 4, axis=1)], axis=1)


def by_threshold(w, x, ids):
    """Decides by sizes, with the same decision at both."""
    if x.shape[-1] < 8:
        raise ValueError("too narrow")
    return lax.fori_loop(0, min(3, x.shape[-1]), lambda _, x: jnp.tanh(x), x)


HONEST = {
    "blocks of a quarter": lambda w, x, ids: blocks(x, jnp.tanh),
    "a scan over blocks": lambda w, x, ids: lax.map(jnp.tanh, x.reshape(4, 4, -1)).reshape(x.shape),
    "one column after the other": lambda w, x, ids: lax.map(jnp.tanh, x.T).T,
    "a bucket of gradients": bucket,
    "a bucket divided by a count": divided_bucket,
    "a place further on": lambda w, x, ids: jnp.roll(x, 1, axis=1) - jnp.roll(x, -2, axis=0),
    "a threshold": by_threshold,
    "a mean and a square root of a width": lambda w, x, ids: (x - x.mean(1, keepdims=True)) / x.shape[1] ** 0.5,
    "all but one": lambda w, x, ids: jnp.pad(x[:, 1:] - x[:, :-1], ((0, 0), (1, 0))),
    "heads that grow": lambda w, x, ids: jnp.swapaxes(x.reshape(4, -1, 8), 1, 2).reshape(x.shape),
    "rows of a table": lambda w, x, ids: x * jnp.take(lax.all_gather(w, "data", tiled=True), ids, axis=0).sum(),
    "a causal mask": lambda w, x, ids: jnp.where(jnp.tri(4, x.shape[1], dtype=bool), x, -jnp.inf),
    "a mask by NumPy": lambda w, x, ids: x @ jnp.where(np.tri(x.shape[1], dtype=bool), 1.0, 0.0),
    "numbers by NumPy": lambda w, x, ids: x @ np.arange(x.shape[1] ** 2, dtype=np.float32).reshape(x.shape[1], -1),
    "an exact GELU": lambda w, x, ids: jax.nn.gelu(x, approximate=False),
    "a sum by a product with ones": lambda w, x, ids: x * (x @ jnp.ones((x.shape[1], 1))),
    "products": lambda w, x, ids: jnp.tanh(x @ lax.all_gather(w, "data", tiled=True)),
    "a product with zeros": lambda w, x, ids: x + (2 * jnp.zeros(x.shape)) @ lax.all_gather(w, "data", tiled=True),
    "a product with zeros in a branch": lambda w, x, ids: lax.cond(
        lax.axis_index("data") == 0,
        lambda z: x + z @ lax.all_gather(w, "data", tiled=True),
        lambda z: x,
        jnp.zeros(x.shape),
    ),
    "its gradient": lambda w, x, ids: jax.grad(
        lambda x: jnp.sum(jnp.sort(jnp.pad(x, ((0, 0), (1, 1))), axis=1)[:, 1:-1] ** 2)
    )(x),
    "random numbers": lambda w, x, ids: x * random_bits(x.shape),
    "carries that are zero times a part": running_maximum,
    "the gradient of zero times a part": lambda w, x, ids: jax.grad(lambda x: running_maximum(w, x, ids).sum())(x),
}


@pytest.mark.parametrize("name", HONEST)
def test_program_that_does_the_same_to_larger_arrays_is_the_same(name):
    assert mismatch(HONEST[name]) == ""


def test_loop_that_runs_less_is_named_with_both_counts():
    assert re.fullmatch(
        "the loop at here:.* runs 7 times at the small size and 3 times at the large one",
        mismatch(CHEATS["loops less"]),
    )

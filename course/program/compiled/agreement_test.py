"""The export for GPUs must be the export for CPUs, in collectives and products."""

import re

import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from course.program import parse
from course.program.compiled.agreement import disagreement
from course.program.program_test import program_of, struct


def between_platforms(local):
    inputs, specs = {"w": struct(16, 8), "x": struct(8, 16)}, {"w": P("data"), "x": P("data")}
    exports = (program_of(local, inputs, specs, P("data"), platform=platform) for platform in ("cpu", "cuda"))
    return disagreement(*map(parse, exports))


def plain(w, x):
    return x @ lax.all_gather(w, "data", tiled=True)


def test_the_same_function_agrees_with_itself():
    assert between_platforms(plain) == ""


def test_program_with_loops_agrees_with_itself():
    def local(w, x):
        return lax.scan(lambda x, _: (jnp.tanh(plain(w, x) @ jnp.ones((8, 16))), None), x, None, length=3)[0]

    assert between_platforms(local) == ""


def more_sent(w, x):
    return plain(w, lax.ppermute(x, "data", [(i, (i + 1) % 8) for i in range(8)]))


def smaller_products(w, x):
    w = lax.all_gather(w, "data", tiled=True)
    return x[:, :8] @ w[:8] + x[:, 8:] @ w[8:]


def twice(w, x):
    return lax.scan(lambda total, _: (total + plain(w, x), None), jnp.zeros_like(plain(w, x)), None, length=2)[0]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (more_sent, r"collective_permute over data of 64 bytes f32: 0 for CPUs, 1 for GPUs"),
        (smaller_products, r"products of f32\[1, 16\] and f32\[16, 8\] written: 1 for CPUs, 0 for GPUs"),
        (twice, r"all_gather over data of 64 bytes f32: 1 for CPUs, 2 for GPUs"),
    ],
)
def test_branch_on_the_platform_is_found(other, message):
    def local(w, x):
        return lax.platform_dependent(w, x, cpu=plain, cuda=other)

    assert re.search(message, between_platforms(local))

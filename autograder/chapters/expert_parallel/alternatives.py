"""Alternative implementations for ``expert_parallel``: each must pass every fact."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax


def by_the_sum_of_all(x, axis_name):
    """Adds everything, and divides once."""
    return lax.psum(x.sum(0), axis_name) / (len(x) * lax.axis_size(axis_name))


def by_a_product(x, axis_name):
    """Rows times equal weights."""
    return lax.pmean(jnp.full(len(x), 1 / len(x), x.dtype) @ x, axis_name)


ALTERNATIVES = {"expert_parallel_mean": (by_the_sum_of_all, by_a_product)}

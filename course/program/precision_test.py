"""Recognition of sums, exponentials and products, however they are written."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from course.program import costs, parse
from course.program.program_test import program_of, struct


def counted(local):
    return costs(parse(program_of(local, {"x": struct(8, 16)}, {"x": P("data")}, P("data"), {"data": 1})))


ONES = {
    "a constant": lambda x: jnp.ones((16, 1)),
    "one and zero times an input": lambda x: 1 + 0 * x[:1].T,
    "an input minus itself": lambda x: (x - x + 1)[:1].T,
    "an input divided by itself": lambda x: (x / x)[:1].T,
    "behind a barrier": lambda x: lax.optimization_barrier(jnp.ones((16, 1))),
}


@pytest.mark.parametrize("case", ONES)
def test_a_product_with_equal_numbers_is_a_sum(case):
    assert counted(lambda x: x @ ONES[case](x)).precise.get("sum of f32") == 1
    assert "sum of f32" not in counted(lambda x: x @ (ONES[case](x) + x[:1].T)).precise


OF_PARTS = {
    "halves": lambda x: x[:, :8] + x[:, 8:],
    "neighbours": lambda x: x[:, ::2] + x[:, 1::2],
    "pairs": lambda x: x.reshape(8, 8, 2)[..., 0] + x.reshape(8, 8, 2)[..., 1],
}


@pytest.mark.parametrize("case", OF_PARTS)
def test_one_part_of_an_array_added_to_another_is_a_sum(case):
    assert counted(lambda x: OF_PARTS[case](x.astype(jnp.bfloat16))).precise == {"sum of bf16": 1}
    assert not counted(lambda x: x[:, :8].astype(jnp.bfloat16) + jnp.sin(x[:, 8:]).astype(jnp.bfloat16)).precise


BY_HAND = {
    "broadcast": lambda x, w: (x[:, :, None] * w[None]).sum(1),
    "the other way": lambda x, w: (w[None] * x[:, :, None]).sum(1),
    "a batch": lambda x, w: jax.vmap(lambda row: (row[:, None] * w).sum(0))(x),
    "cast before": lambda x, w: (x.astype(jnp.bfloat16)[:, :, None] * w.astype(jnp.bfloat16)[None]).sum(1),
    "negated": lambda x, w: -(-(x[:, :, None] * w[None])).sum(1),
    "repeated and tiled": lambda x, w: (
        (jnp.repeat(x, 16, axis=1) * jnp.tile(w.reshape(1, -1), (8, 1))).reshape(8, 16, 16).sum(1)
    ),
    "transposed": lambda x, w: (x.T[:, :, None] * w[:, None]).transpose(1, 2, 0).sum(2),
}
NOT_BY_HAND = {
    "squares": lambda x, w: (x * x).sum(1),
    "a scale": lambda x, w: (x * w[0]).sum(1),
    "a mean of a norm": lambda x, w: ((x - x.mean(1, keepdims=True)) ** 2).sum(1),
    "an outer product": lambda x, w: (x[:, :1] * x[:1]).sum(0),
    "an outer product, transposed": lambda x, w: (x[:, :1] * x[:1]).T.sum(1),
    "one-hot rows": lambda x, w: (x[:, :, None] == jnp.arange(4.0)).sum(0, dtype=jnp.float32),
    "sines of positions": lambda x, w: (x * jnp.cos(jnp.arange(8.0)[:, None] * jnp.arange(16.0))).sum(0),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_a_multiplication_that_is_summed_like_a_product_is_one(case):
    counts = counted(lambda x: BY_HAND[case](x, x.T @ x))
    assert sum(counts.products.values()) == 2, counts.products
    assert counts.flops == counted(lambda x: x @ (x.T @ x)).flops


def test_a_sum_of_selected_rows_counts_like_a_product_with_a_mask_but_multiplies_nothing():
    counts = counted(lambda x: jnp.where((x > 0)[:, :, None], (x.T @ x)[None], 0).sum(1))
    assert counts.flops == counted(lambda x: x @ (x.T @ x)).flops
    assert counts.products == {"f32 x f32": 1}


@pytest.mark.parametrize("case", NOT_BY_HAND)
def test_other_sums_of_multiplications_are_none(case):
    assert sum(counted(lambda x: NOT_BY_HAND[case](x, x.T @ x)).products.values()) == (case == "a scale")


def test_exponentials_count_where_they_are_summed_with_their_elements():
    counts = counted(lambda x: jax.nn.softmax(x, axis=-1))
    assert (counts.precise["exponential of f32"], counts.taken["exponential of f32"]) == (1, 8 * 16)
    for activation in (jax.nn.sigmoid, jax.nn.silu, lambda x: jax.nn.gelu(x, approximate=False)):
        assert "exponential of f32" not in counted(lambda x, f=activation: f(x) @ x.T @ x).precise
    assert "exponential of f32" in counted(lambda x: (jax.nn.sigmoid(x) / (1 - jax.nn.sigmoid(x))).sum(1)).precise

"""Recognition of sums, exponentials and products, however they are written."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from course.program import ProgramError, contractions, costs, parse
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


def low(x):
    return x.astype(jnp.bfloat16)


def test_a_sum_over_a_dim_of_size_1_is_no_sum():
    def loss(x):
        return jnp.vdot(jnp.tanh(low(x)[None]), low(x))

    assert counted(jax.grad(loss)).precise == {}
    assert counted(lambda x: x[:, None].sum(1)).precise == {}
    assert counted(lambda x: x[:, None].sum(2)).precise == {"sum of f32": 1}


def test_a_sum_of_squares_is_as_precise_as_its_squares():
    assert counted(lambda x: jnp.mean(low(x) * low(x), 1, dtype=jnp.float32)).precise == {"sum of bf16": 1}
    assert counted(lambda x: jnp.mean(jnp.square(low(x)), 1, dtype=jnp.float32)).precise == {"sum of bf16": 1}
    assert counted(lambda x: jnp.mean(jnp.square(low(x).astype(jnp.float32)), 1)).precise == {"sum of f32": 1}


def test_a_function_of_a_constant_may_have_any_precision():
    assert counted(lambda x: low(x) / jnp.sqrt(jnp.asarray(16, jnp.bfloat16))).precise == {}
    assert counted(lambda x: low(x) / jnp.sqrt(low(x))).precise == {"sqrt of bf16": 1}


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
    "an outer product, its dims merged": lambda x, w: jnp.outer(x[0], x[:, 0]).reshape(-1).sum()[None],
    "a product of three": lambda x, w: (x[:, :, None] * w[None] * jnp.sin(x[:, :, None] + w)).sum(1),
    "cosines of all pairs": lambda x, w: (jnp.sin(w) / (x[:1] * x[:1].T)).sum(0),
    "one or the other": lambda x, w: jnp.where(w > 0, x[:1], x[:1].T).sum(0),
    "integers": lambda x, w: (jnp.arange(8)[:, None, None] * jnp.arange(16)[:, None] * jnp.arange(4)).sum(1),
    "the gain's gradient of a norm of repeated rows": lambda x, w: jax.grad(normed_rows)(x[0], x[:4]),
    "a bias's gradient behind a masked mean": lambda x, w: jax.grad(pooled)(x[0], x.reshape(2, 4, 16)),
    "sines of positions": lambda x, w: (x * jnp.cos(jnp.arange(8.0)[:, None] * jnp.arange(16.0))).sum(0),
}


def normed_rows(gain, x):
    rows = jnp.repeat(x, 2, axis=0)
    normed = rows * lax.rsqrt(jnp.mean(rows * rows, axis=-1, keepdims=True)) * gain
    return jnp.sum(normed**2)


def pooled(bias, x):
    mask = (x[:, :, 0] > 0).astype(x.dtype)
    means = jnp.sum((x + bias) * mask[:, :, None], axis=1) / jnp.maximum(mask.sum(1, keepdims=True), 1)
    return jnp.sum(means**2)


@pytest.mark.parametrize("case", BY_HAND)
def test_a_multiplication_that_is_summed_like_a_product_is_one(case):
    counts = counted(lambda x: BY_HAND[case](x, x.T @ x))
    assert sum(counts.products.values()) == 2, counts.products
    assert counts.flops == counted(lambda x: x @ (x.T @ x)).flops


DTYPES = {
    "cast before it is broadcast": (lambda a, b: (a.astype(jnp.float32)[:, :, None], b), "f32 x f32"),
    "cast to a wider one for the sum": (
        lambda a, b: (jnp.repeat(a[:, :, None], 16, 2).astype(jnp.float32), b),
        "bf16 x f32",
    ),
    "broadcast, then narrowed": (
        lambda a, b: (
            jnp.repeat(a.astype(jnp.float32)[:, :, None], 16, 2).astype(jnp.bfloat16),
            b.astype(jnp.bfloat16),
        ),
        "bf16 x bf16",
    ),
    "a mask": (lambda a, b: (jnp.repeat((a > 0)[:, :, None], 16, 2).astype(jnp.float32), b), "f32 x f32"),
}


@pytest.mark.parametrize("case", DTYPES)
def test_a_factor_has_the_dtype_in_which_it_is_multiplied(case):
    factors, dtypes = DTYPES[case]

    def local(x):
        a, b = factors(x.astype(jnp.bfloat16), (x.T @ x)[None])
        return (a * b).sum(1).astype(jnp.float32)

    assert counted(local).products == {"f32 x f32": 1, dtypes: 1 + (dtypes == "f32 x f32")}


def test_sums_that_share_thousands_of_terms_are_counted_in_little_memory_or_refused(monkeypatch):
    def local(x):
        total = x[:, :, None] * (x.T @ x)[None]
        for _ in range(200):
            total = total + x[:, :, None] * (x.T @ x)[None]
        return sum(total.sum(1) for _ in range(4))

    assert counted(local).products == {"f32 x f32": 201 + 4 * 201}
    monkeypatch.setattr(contractions, "MAX_STEPS", 500)
    with pytest.raises(ProgramError, match="add up too many operations to follow"):
        counted(local)


def test_a_sum_of_selected_rows_counts_like_a_product_with_a_mask_but_multiplies_nothing():
    counts = counted(lambda x: jnp.where((x > 0)[:, :, None], (x.T @ x)[None], 0).sum(1))
    assert counts.flops == counted(lambda x: x @ (x.T @ x)).flops
    assert counts.products == {"f32 x f32": 1}


@pytest.mark.parametrize("case", NOT_BY_HAND)
def test_other_sums_of_multiplications_are_none(case):
    counts = counted(lambda x: NOT_BY_HAND[case](x, x.T @ x))
    assert sum(counts.products.values()) == counts.written.get("dot_general", 0)


def test_exponentials_count_where_they_are_summed_with_their_elements():
    counts = counted(lambda x: jax.nn.softmax(x, axis=-1))
    assert (counts.precise["exponential of f32"], counts.taken["exponential of f32"]) == (1, 8 * 16)
    for activation in (jax.nn.sigmoid, jax.nn.silu, lambda x: jax.nn.gelu(x, approximate=False)):
        assert "exponential of f32" not in counted(lambda x, f=activation: f(x) @ x.T @ x).precise
    assert "exponential of f32" in counted(lambda x: (jax.nn.sigmoid(x) / (1 - jax.nn.sigmoid(x))).sum(1)).precise

"""Merged kernels: random bits, norms, softmax, and results that are computed from the same values.

The numbers of reads and writes of arrays of the input's size are those of XLA's GPU compiler for the same
functions.
"""

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from course.machines import machine
from course.program import costs, memory, parse, timeline
from course.program.program_test import program_of, struct
from course.program.simulator.merging import ROW

H100 = machine("8xH100")
MIB = 2**20


def parsed(local, *shapes, platform="cpu"):
    inputs = {f"x{number}": struct(*shape) for number, shape in enumerate(shapes)}
    program = program_of(local, inputs, dict.fromkeys(inputs, P()), P(), platform=platform)
    return program, parse(program)


def passes(local, *shapes):
    """Number of arrays of the first input's size that all kernels together read and write."""
    _, module = parsed(local, *shapes)
    return sum(bar.bytes for bar in timeline(module, H100).bars) / (4 * math.prod(shapes[0]))


def layer_norm(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6)


def norm_of_two_moments(x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) - jnp.square(mean) + 1e-6)


def rms(x):
    return lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def adam(p, m, v, g):
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    return p - m / (jnp.sqrt(v) + 1e-8), m, v


def softmax_gradient(p, g):
    return p * (g - (p * g).sum(-1, keepdims=True))


SQUARE = (1024, 1024)
PASSES = {
    "a softmax": (jax.nn.softmax, [SQUARE], 2),
    "of masked numbers": (lambda x: jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(SQUARE, bool)), x, -1e9)), [SQUARE], 2),
    "of the longest rows": (jax.nn.softmax, [(64, ROW)], 2),
    "of longer rows": (jax.nn.softmax, [(64, 2 * ROW)], 4),
    "along another dim": (lambda x: jax.nn.softmax(x, 0), [SQUARE], 4),
    "its gradient": (softmax_gradient, [SQUARE, SQUARE], 5),
    "a layer norm": (layer_norm, [SQUARE], 2),
    "an RMS norm": (lambda x: x * rms(x), [SQUARE], 2),
    "one whose statistics are kept": (lambda x: (x * rms(x), rms(x)), [SQUARE], 3),
    "two moments at once": (norm_of_two_moments, [SQUARE], 3),
    "a logarithm of a sum": (lambda x: jax.nn.logsumexp(x, -1), [SQUARE], 2),
    "the place of a maximum": (lambda x: x + jnp.argmax(x, -1, keepdims=True).astype(x.dtype), [SQUARE], 2),
    "sums along both dims": (lambda x: (x.sum(0), x.sum(1)), [SQUARE], 2),
    "two sums along one dim, and a product": (lambda x: (x.sum(1), jnp.square(x).sum(1), 2 * x), [SQUARE], 2),
    "an optimiser": (adam, [SQUARE] * 4, 7),
    "what a product must stand between": (lambda x: ((y := x + 1), jnp.sin(y @ y) + y), [SQUARE], 2 + 2 + 3),
}


@pytest.mark.parametrize("case", PASSES)
def test_kernels_read_each_array_once(case):
    local, shapes, expected = PASSES[case]
    assert passes(local, *shapes) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("draw", [jax.random.bits, jax.random.uniform, jax.random.normal, jax.random.gumbel])
def test_random_numbers_are_one_kernel_that_writes_them_alone(draw):
    """The same on every platform: JAX writes threefry as a loop for CPUs alone."""
    shape = (64 * MIB,)
    for platform in ("cpu", "cuda"):
        program, module = parsed(lambda x: draw(jax.random.key(x[0].astype(int)), shape), (1,), platform=platform)
        kernels = [bar for bar in timeline(module, H100).bars if bar.bytes > 64]
        assert [bar.bytes for bar in kernels] == [pytest.approx(4 * shape[0], rel=1e-6)]
        assert memory(module, program).temporaries < 1024
        assert 100 * shape[0] < costs(module).elementwise < 200 * shape[0]


def test_a_mask_of_64_million_takes_its_arithmetic():
    program, module = parsed(lambda x: jax.random.bernoulli(jax.random.key(x[0].astype(int)), 0.1, (64 * MIB,)), (1,))
    assert timeline(module, H100).seconds == pytest.approx(0.13e-3, rel=0.05)
    assert memory(module, program).temporaries < 0.1 * MIB


def test_dropout_costs_little_compared_with_its_layer():
    def layer(x, w, key=None):
        y = jax.nn.gelu(x @ w)
        return jnp.where(jax.random.bernoulli(key, 0.9, y.shape), y / 0.9, 0.0) if key is not None else y

    def loss(x, w, key=None):
        return jnp.sum(lax.scan(lambda x, w: (layer(x, w, key), None), x, w)[0])

    shapes = [(2048, 2048), (4, 2048, 2048)]
    plain, dropped = (
        timeline(parsed(jax.grad(lambda x, w, key=key: loss(x, w, key)), *shapes)[1], H100).seconds
        for key in (None, jax.random.key(0))
    )
    assert 1 < dropped / plain < 1.12


def test_only_loops_of_integer_rounds_are_written_out():
    def loops(trips, dtype):
        start = lambda x: (x + 1).astype(dtype)  # noqa: E731
        _, module = parsed(lambda x: lax.fori_loop(0, trips, lambda _, c: c * c + 1, start(x)), (8, 8))
        return sum(op.kind == "while" for op in module.main.ops)

    assert [loops(5, jnp.uint32), loops(6, jnp.uint32), loops(5, jnp.float32)] == [0, 1, 1]


def test_a_loop_of_one_trip_is_no_loop():
    def step(x, w):
        return jnp.tanh(x @ w), x

    once = lambda x, w: lax.scan(step, x, w)  # noqa: E731
    written = lambda x, w: (jnp.tanh(x @ w[0]), x[None])  # noqa: E731
    shapes = [(512, 512), (1, 512, 512)]
    parsed_programs = [parsed(local, *shapes) for local in (once, written)]
    assert [memory(module, program).temporaries for program, module in parsed_programs] == [0, 0]
    times = [timeline(module, H100).seconds for _, module in parsed_programs]
    assert times[0] == pytest.approx(times[1], rel=1e-6)

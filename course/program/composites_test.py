"""Common functions are read, priced and run; unknown composites are refused by name and line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy import special
from jax.sharding import PartitionSpec as P

from course.machines import machine
from course.mesh import make_mesh
from course.program import ProgramError, compile_program, costs, parse, timeline
from course.program.program_test import program_of, struct

X = np.linspace(0.05, 0.95, 64, dtype=np.float32).reshape(8, 8)
KEY = np.array([0, 7], np.uint32)


def with_key(draw):
    return lambda x: draw(jax.random.wrap_key_data(jnp.asarray(KEY))) + 0 * x


FUNCTIONS = {
    **{name: getattr(jnp, name) for name in "sinh cosh tan tanh arcsin arccos arctan arcsinh exp2 log2 log10".split()},
    **{name: getattr(jnp, name) for name in "arctanh cbrt sinc cumsum cumprod sort argmax".split()},
    **{name: getattr(jax.nn, name) for name in "silu softplus mish softmax elu".split()},
    **{name: getattr(lax, name) for name in "erf erfc erf_inv lgamma digamma rsqrt".split()},
    **{name: getattr(special, name) for name in "ndtr entr logit expit gammaln".split()},
    "exact gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "its gradient": jax.grad(lambda x: jax.nn.gelu(x, approximate=False).sum()),
    "gradient of erf": jax.grad(lambda x: lax.erf(x).sum()),
    "arccosh": lambda x: jnp.arccosh(1 + x),
    "top_k": lambda x: lax.top_k(x, 2)[0],
    "places of top_k": lambda x: lax.top_k(x, 2)[1],
    "truncated normal": with_key(lambda key: jax.random.truncated_normal(key, -2, 2, (1, 8))),
    "initializer": with_key(lambda key: jax.nn.initializers.lecun_normal()(key, (8, 8))[:1]),
}


@pytest.mark.long
def test_functions_are_read_priced_and_run():
    def local(x):
        return tuple(jnp.ravel(function(x)) for function in FUNCTIONS.values())

    program = program_of(local, {"x": struct(8, 8)}, {"x": P()}, tuple(P() for _ in FUNCTIONS), {"data": 1})
    module = parse(program)
    counted = costs(module)
    assert 0 < counted.elementwise < 1e6 and timeline(module, machine("8xH100")).seconds > 0
    results = compile_program(program, make_mesh({"data": 1}))({"x": X})
    for number, (name, function) in enumerate(FUNCTIONS.items()):
        expected = np.ravel(function(X))
        assert np.allclose(results[f"out/{number}"], expected, rtol=2e-4, atol=1e-5), name


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ["erf", "sinh"])
def test_function_costs_what_it_is_made_of(name, dtype):
    parsed = parse(
        program_of(getattr(lax, name), {"x": struct(64, 8, dtype=dtype)}, {"x": P("data")}, P("data"), {"data": 8})
    )
    assert costs(parsed).elementwise > 5 * 64


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda x: jnp.abs(jnp.fft.fft(x)), "stablehlo.fft"),
        (lambda x: lax.approx_max_k(x, 2)[0], "ApproxTopK"),
        (lambda x: jnp.linalg.inv(x[:, :8]), "getrf"),
        (lambda x: lax.igamma(x, x + 1), "how often this loop runs"),
        (lax.composite(lambda x: x * 2, "my.double"), "function my.double is not allowed"),
        (lax.composite(lambda x: x @ x, "chlo.erf"), "function erf consists of other operations"),
        (lax.composite(lambda x: lax.psum(x, "data"), "chlo.erf"), "function erf consists of other operations"),
        (lax.composite(lambda x: jnp.sum(x) + x, "chlo.erf"), "function erf consists of other operations"),
        (lax.composite(lambda x: x[:, :2], "chlo.top_k"), "function top_k consists of other operations"),
    ],
)
def test_function_that_is_not_read_is_named_with_its_line(function, named):
    program = program_of(
        lambda x: function(x), {"x": struct(64, 8)}, {"x": P("data")}, P("data"), locate=lambda f: "here"
    )
    with pytest.raises(ProgramError, match=rf"here:\d+: .*{named}"):
        costs(parse(program))

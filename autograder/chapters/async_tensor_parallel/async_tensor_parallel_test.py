"""The contract of ``async_tensor_parallel``: bytes in each direction, and rings inside a model."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from autograder.chapters.async_tensor_parallel import CONTRACT, tasks
from autograder.contract.task import Evidence
from autograder.proof.central_differences import places
from course.mesh import make_mesh, vary_alike, varying_axes
from course.model import MLPLayer
from course.program import Collective, Costs, Memory
from solutions.async_tensor_parallel import matmul_ring_scatter, ring_gather_matmul

TASKS = {task.name: task for task in CONTRACT.tasks}


def test_the_oracle_of_the_mlp_is_the_course_models_layer_without_norm_and_residual():
    layer = MLPLayer(6, 40, rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(layer))
    x = jax.random.normal(jax.random.key(1), (3, 6))
    np.testing.assert_allclose(tasks.plain(params, layer.norm(x)) + x, layer(x), atol=1e-6)


def sent(shift, size=8, count=1):
    """Evidence of one permute over ``size`` devices."""
    permute = Collective("collective_permute", ("tensor",), size, 100, 100.0, count, "mine:1", (25,), "f32", shift)
    case = replace(TASKS["ring_gather_matmul"].cases[0], mesh={"tensor": size})
    return Evidence(case, (), (), {}, {}, Costs(0, 0, 0, (permute,), {}), Memory(0, 0, 0, 0, ()), "mine:2")


@pytest.mark.parametrize(
    ("shift", "size", "question"),
    [
        (1, 8, "Which way does each half go?"),
        (7, 8, "Which way does each half go?"),
        (3, 8, "How many places does each half move"),
        (4, 8, "How many places does each half move"),
        (1, 2, ""),
    ],
)
def test_bytes_each_way_go_to_both_neighbours(shift, size, question):
    fact = tasks.equal_ways(sent(shift, size))
    assert fact.passed is not bool(question) and question in fact.message


def test_zeros_can_be_typed_like_what_is_added_to_them():
    seen = []

    def local(x, y):
        zeros, same = vary_alike(jnp.zeros(()), x)
        pair = vary_alike(x, y)
        seen.extend(varying_axes(array) for array in (zeros, same, *pair))
        return zeros + pair[0].sum() + pair[1].sum()

    mesh = make_mesh({"data": 2, "tensor": 2})
    specs, out_specs = (P("data"), P("tensor")), P("data", "tensor")
    sharded = jax.shard_map(lambda x, y: local(x, y)[None, None], mesh=mesh, in_specs=specs, out_specs=out_specs)
    jax.eval_shape(sharded, jnp.zeros(2), jnp.zeros(2))
    assert [set(axes) for axes in seen] == [{"data"}, {"data"}, {"data", "tensor"}, {"data", "tensor"}]


@pytest.mark.parametrize("dtype", places("bfloat16", "float32"))
def test_layers_in_a_scan_with_remat_have_the_gradients_of_one_device(dtype):
    """As in a Transformer: kernels replicated over ``data``, in a loop over layers, recomputed."""
    keys = jax.random.split(jax.random.key(0), 3)
    up, down = (jax.random.normal(keys[i], (2, 8 + 8 * i, 16 - 8 * i), dtype) / 4 for i in (0, 1))
    x = jax.random.normal(keys[2], (4, 8, 8), dtype)

    def stack(product, scatter):
        def loss(kernels, x):
            @jax.checkpoint
            def layer(x, kernels):
                return x + scatter(jax.nn.gelu(product(x, kernels[0])), kernels[1]), None

            return jax.lax.scan(layer, x, kernels)[0]

        return loss

    one_device = stack(lambda x, k: x @ k, lambda x, k: x @ k)
    several = jax.shard_map(
        stack(lambda x, k: ring_gather_matmul(x, k, "tensor"), lambda x, k: matmul_ring_scatter(x, k, "tensor")),
        mesh=make_mesh({"data": 2, "tensor": 4}),
        in_specs=((P(None, None, "tensor"), P(None, "tensor")), P("data", "tensor")),
        out_specs=P("data", "tensor"),
    )

    def gradients(function):
        return jax.jit(jax.grad(lambda k, x: jnp.sum(function(k, x).astype(jnp.float32) ** 2), (0, 1)))((up, down), x)

    for gradient, expected in zip(
        jax.tree.leaves(gradients(several)), jax.tree.leaves(gradients(one_device)), strict=True
    ):
        assert gradient.dtype == expected.dtype == jnp.dtype(dtype)
        off = jnp.max(jnp.abs(gradient - expected).astype(jnp.float32)) / jnp.max(jnp.abs(expected).astype(jnp.float32))
        assert off < (1e-5 if dtype == "float32" else 0.05)


def test_no_bytes_either_way_are_not_as_many_each_way():
    nothing = replace(sent(1), costs=Costs(0, 0, 0, (), {}))
    assert not tasks.equal_ways(nothing).passed
    assert tasks.equal_ways(replace(nothing, case=replace(nothing.case, mesh={"tensor": 1}))).passed

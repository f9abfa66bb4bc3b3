"""The contract of ``async_tensor_parallel``: oracles against central differences, limits, and what is its own."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from autograder.chapters.async_tensor_parallel import CONTRACT, tasks
from autograder.chapters.async_tensor_parallel.mutants import hides_the_forward_pass_alone, leaves_the_derivative_to_jax
from autograder.check import check_function
from autograder.contract.task import Evidence, references
from autograder.contract.verdict import FAIL
from autograder.proof.mutants import judged_unseen
from autograder.release.reference_metrics import look
from course.mesh import make_mesh, vary_alike, varying_axes
from course.model import MLPLayer
from course.program import Collective, Costs, Memory
from solutions.async_tensor_parallel import async_tp_mlp, matmul_ring_scatter, ring_gather_matmul

TASKS = {task.name: task for task in CONTRACT.tasks}
KNOWN = references("async_tensor_parallel")


def moved(tree, path, at, by):
    def leaf(p, x):
        if p != path:
            return x
        x = np.array(x, np.float64)
        x[at] += by
        return x.astype(np.float32)

    return jax.tree.map_with_path(leaf, tree)


@pytest.mark.parametrize("place", ["tensor=8", "data=2 x tensor=4", "tensor=2 x data=4"])
@pytest.mark.parametrize("name", ["ring_gather_matmul", "matmul_ring_scatter", "async_tp_mlp"])
def test_gradients_of_the_oracle_equal_central_differences(name, place):
    task = TASKS[name]
    case = next(case for case in task.cases if case.name == place)
    inputs = task.draw(np.random.default_rng(0), case)
    found = task.oracle(inputs, case)["gradients"]

    def worth(given):
        """The scalar whose gradients are judged: of the MLP it is quadratic in the result, of a product linear."""
        values = task.oracle(given, case)["values"].astype(np.float64)
        return np.vdot(values**2 / 2 if name == "async_tp_mlp" else values, inputs["upstream"])

    kinds = {"params": inputs["params"], "x": inputs["x"]} if name == "async_tp_mlp" else {
        "kernel": inputs["kernel"], "x": inputs["x"]}  # fmt: skip
    for path, entering in jax.tree.leaves_with_path(kinds):
        gradient = found
        for key in path:
            gradient = gradient[key.key]
        # The sum over devices that hold the same part is the whole's.
        whole = gradient.reshape(-1, *entering.shape).sum(0, np.float64)
        at = np.unravel_index(np.argmax(np.abs(whole)), whole.shape)
        above, below = (worth({**inputs, **moved(kinds, path, at, by)}) for by in (1e-2, -1e-2))
        assert whole[at] == pytest.approx((above - below) / 2e-2, rel=1e-2), path


def test_the_oracle_of_the_mlp_is_the_course_models_layer_without_norm_and_residual():
    layer = MLPLayer(6, 40, rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(layer))
    x = jax.random.normal(jax.random.key(1), (3, 6))
    np.testing.assert_allclose(tasks.plain(params, layer.norm(x)) + x, layer(x), atol=1e-6)


def test_limits_lie_between_reference_and_synchronous_version_which_differ_by_more_than_15_percent():
    for name in ("ring_gather_matmul", "matmul_ring_scatter"):
        seconds, held = KNOWN[name]["seconds"], KNOWN[name]["temporaries"]
        assert seconds["reference"] <= tasks.TIME * seconds["naive"] < seconds["naive"] / 1.15
        assert held["reference"] * 1.15 < tasks.TEMPORARIES * held["naive"] < held["naive"] / 1.15
    for name in ("bidirectional_gather_matmul", "bidirectional_matmul_scatter"):
        seconds = KNOWN[name]["seconds"]
        assert seconds["reference"] * 1.15 < tasks.BOTH_WAYS * seconds["naive"] < seconds["naive"]
    both = KNOWN["async_tp_mlp"]
    assert both["exposed"]["reference"] * 1.15 < tasks.EXPOSED * both["exposed"]["naive"]
    assert both["seconds"]["reference"] * 1.15 < tasks.MLP_TIME * both["seconds"]["naive"]


def test_a_ring_with_a_synchronous_backward_pass_exposes_half_and_jaxs_derivative_is_slower_than_no_ring():
    task, both = TASKS["async_tp_mlp"], KNOWN["async_tp_mlp"]
    half = look(task, hides_the_forward_pass_alone)
    assert half["exposed"] > 1.15 * tasks.EXPOSED * both["exposed"]["naive"]
    left = look(task, leaves_the_derivative_to_jax)
    assert left["exposed"] < 0.1 * both["exposed"]["naive"] and left["seconds"] > 1.15 * both["seconds"]["naive"]


def test_a_learner_whose_derivative_is_slow_is_told_so_and_not_what_to_write():
    result = check_function("async_tensor_parallel", TASKS["async_tp_mlp"], leaves_the_derivative_to_jax,
                            lambda _: None, full=False)  # fmt: skip
    (fact,) = [fact for fact in result.facts if fact.passed is False]
    assert fact.name == "predicted time" and "times the naive's" in fact.message
    assert "custom_vjp" not in fact.message


def sent(shift, size=8, count=1):
    """Evidence of one permute over ``size`` devices."""
    one = Collective("collective_permute", ("tensor",), size, 100, 100.0, count, "mine:1", (25,), "f32", shift)
    case = replace(TASKS["ring_gather_matmul"].cases[0], mesh={"tensor": size})
    return Evidence(case, (), (), {}, {}, Costs(0, 0, 0, (one,), {}), Memory(0, 0, 0, 0, ()), "mine:2")


@pytest.mark.parametrize(("shift", "size", "passed"), [(1, 8, False), (7, 8, False), (3, 8, False), (4, 8, True),
                                                       (1, 2, True)])  # fmt: skip
def test_bytes_each_way_are_told_apart_by_the_shorter_way(shift, size, passed):
    fact = tasks.equal_ways(sent(shift, size))
    assert fact.passed is passed
    assert passed or "Which way does each half go?" in fact.message


def test_zeros_can_be_typed_like_what_is_added_to_them():
    seen = []

    def local(x, y):
        zeros, same = vary_alike(jnp.zeros(()), x)
        both = vary_alike(x, y)
        seen.extend(varying_axes(array) for array in (zeros, same, *both))
        return zeros + both[0].sum() + both[1].sum()

    mesh = make_mesh({"data": 2, "tensor": 2})
    jax.eval_shape(
        jax.shard_map(
            lambda x, y: local(x, y)[None, None], mesh=mesh, in_specs=(P("data"), P("tensor")),
            out_specs=P("data", "tensor"),
        ),
        jnp.zeros(2), jnp.zeros(2),
    )  # fmt: skip
    assert [set(axes) for axes in seen] == [{"data"}, {"data"}, {"data", "tensor"}, {"data", "tensor"}]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_in_a_scan_with_remat_have_the_gradients_of_one_device(dtype):
    """As a Transformer would use them: kernels the same over ``data``, in a loop over layers, recomputed."""
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

    one = stack(lambda x, k: x @ k, lambda x, k: x @ k)
    several = jax.shard_map(
        stack(lambda x, k: ring_gather_matmul(x, k, "tensor"), lambda x, k: matmul_ring_scatter(x, k, "tensor")),
        mesh=make_mesh({"data": 2, "tensor": 4}),
        in_specs=((P(None, None, "tensor"), P(None, "tensor")), P("data", "tensor")),
        out_specs=P("data", "tensor"),
    )

    def gradients(function):
        return jax.jit(jax.grad(lambda k, x: jnp.sum(function(k, x).astype(jnp.float32) ** 2), (0, 1)))((up, down), x)

    for found, wanted in zip(jax.tree.leaves(gradients(several)), jax.tree.leaves(gradients(one)), strict=True):
        assert found.dtype == wanted.dtype == jnp.dtype(dtype)
        off = jnp.max(jnp.abs(found - wanted).astype(jnp.float32)) / jnp.max(jnp.abs(wanted).astype(jnp.float32))
        assert off < (1e-5 if dtype == "float32" else 0.05)


PUBLIC_AXES = {axis for task in CONTRACT.tasks for case in task.cases for axis in case.mesh}


def knows_three_names(x, kernel, axis_name):
    result = ring_gather_matmul(x, kernel, axis_name)
    return result if axis_name in PUBLIC_AXES else jnp.roll(result, 1, -2)


def knows_the_public_sizes(x, kernel, axis_name):
    result = matmul_ring_scatter(x, kernel, axis_name)
    return result if kernel.shape == (5, 6) else 2 * result


def supposes_that_ones_flow_back(params, x, axis_name):
    def plain(params, x):
        return async_tp_mlp(params, x, axis_name)

    layers = jax.custom_vjp(plain)
    layers.defvjp(lambda *given: (plain(*given), given), lambda kept, g: jax.vjp(plain, *kept)[1](g * 0 + 1))
    return layers(params, x)


@pytest.mark.parametrize(
    ("task", "function"),
    [
        ("ring_gather_matmul", knows_three_names),
        ("matmul_ring_scatter", knows_the_public_sizes),
        ("async_tp_mlp", supposes_that_ones_flow_back),
    ],
)
def test_what_knows_the_public_cases_alone_earns_nothing(task, function):
    result = judged_unseen("async_tensor_parallel", task, function)
    assert (result.verdict, result.points, result.message) == (FAIL, 0, "")


def test_no_bytes_either_way_are_not_as_many_each_way():
    nothing = replace(sent(1), costs=Costs(0, 0, 0, (), {}))
    assert not tasks.equal_ways(nothing).passed
    assert tasks.equal_ways(replace(nothing, case=replace(nothing.case, mesh={"tensor": 1}))).passed

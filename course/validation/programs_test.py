"""The validation programs match their descriptions, in results and in size."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from course.mesh import make_mesh
from course.program import compile_program, costs, parse
from course.schedules import num_ticks
from course.validation.pipelines import Layer, pipeline, uva_pipeline
from course.validation.rings import gather_matmul
from course.validation.single_device import RUNS, Sizes, parameters, single_device

SMALL = Sizes(num_layers=2, width=32, num_heads=2, vocabulary=64, sequence=16, batch=8)
NARROW = Layer(width=16, hidden=32, rows=2, norm=True)


def run(program, **arrays):
    """Results of the Program on emulated devices, from numbers drawn by name and shape unless given."""
    inputs = {}
    for i, leaf in enumerate(program.inputs):
        generator = np.random.default_rng(i)
        if leaf.name in arrays:
            inputs[leaf.name] = arrays[leaf.name]
        elif np.issubdtype(leaf.dtype, np.integer):
            inputs[leaf.name] = generator.integers(0, 60, leaf.shape).astype(leaf.dtype)
        else:
            inputs[leaf.name] = (0.2 * generator.normal(size=leaf.shape)).astype(jnp.dtype(leaf.dtype))
    return inputs, compile_program(program, make_mesh(program.mesh))(inputs)


# One device


def test_transformer_has_the_published_number_of_parameters():
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(parameters(Sizes()))) == 155_877_376


@pytest.mark.long
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("chosen", RUNS, ids=lambda run: run.name)
def test_every_run_is_read_on_both_platforms(chosen, platform):
    counted = costs(parse(single_device(chosen, SMALL, platform)))
    assert counted.flops > 0
    assert not counted.collectives


def first_moments(chosen, sizes):
    """Adam's first moment after one step, a tenth of the gradient; everything computed in float32."""
    program = single_device(replace(chosen, dtype="float32"), sizes)
    zeros = {leaf.name: np.zeros(leaf.shape, np.float32) for leaf in program.inputs if "/mu/" in leaf.name}
    _, results = run(program, **zeros, **{"state/count": np.zeros((), np.int32)})
    return {name: value for name, value in results.items() if "/mu/" in name or name == "loss"}


@pytest.mark.long
@pytest.mark.parametrize("chosen", RUNS[2:5], ids=lambda run: run.name)
def test_unrolled_and_rematerialised_runs_have_the_gradients_and_dropout_masks_of_the_plain_scan(chosen, plain_moments):
    for name, value in first_moments(chosen, SMALL).items():
        np.testing.assert_allclose(value, plain_moments[name], rtol=2e-4, atol=2e-6, err_msg=name)


@pytest.fixture(scope="module")
def plain_moments():
    return first_moments(RUNS[0], SMALL)


def test_accumulated_gradients_are_those_of_the_whole_batch():
    """Without dropout, because microbatches draw their own masks."""
    accumulated, at_once = (first_moments(chosen, replace(SMALL, dropout=0.0)) for chosen in (RUNS[3], RUNS[5]))
    for name in accumulated.keys() - {"loss"}:
        np.testing.assert_allclose(accumulated[name], at_once[name], rtol=2e-4, atol=2e-6, err_msg=name)
    assert accumulated["loss"] == pytest.approx(at_once["loss"], rel=1e-4)


# Pipelines


def layers_in_order(inputs, num_stages, num_repeats):
    """The expected result of a pipeline: one layer after the other, on one device."""
    stack = {name.split("/")[1]: jnp.asarray(a) for name, a in inputs.items() if name.startswith("params/")}
    x = jnp.asarray(inputs["x"])
    for repeat in range(num_repeats):
        for stage in range(num_stages):
            for layer in range(stack["up"].shape[2]):
                w = {name: leaf[repeat, stage, layer] for name, leaf in stack.items()}
                centred = x - x.mean(-1, keepdims=True)
                normal = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
                hidden = jax.nn.silu((normal * w["scale"] + w["shift"]) @ w["up"] + w["up_bias"])
                x = x + hidden @ w["down"] + w["down_bias"]
    return x


@pytest.mark.long
@pytest.mark.parametrize(
    ("stages", "microbatches", "repeats", "layers", "masked"),
    [(1, 3, 2, 1, True), (4, 1, 1, 2, False), (4, 6, 3, 1, True), (4, 6, 3, 1, False), (8, 3, 2, 1, True)],
)
def test_pipeline_gives_what_its_layers_give_in_order(stages, microbatches, repeats, layers, masked):
    program = pipeline(stages, microbatches, repeats, layers_per_stage=layers, layer=NARROW, masked=masked)
    inputs, results = run(program)
    expected = layers_in_order(inputs, stages, repeats)
    np.testing.assert_allclose(results["outputs"][-1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("microbatches", "repeats", "masked"), [(3, 1, True), (3, 1, False), (2, 2, True), (6, 2, False)]
)
def test_pipeline_gives_the_gradients_of_its_layers_in_order(microbatches, repeats, masked):
    program = pipeline(4, microbatches, repeats, layer=NARROW, masked=masked, backward=True, data=2)
    inputs, results = run(program)

    def loss(params):
        return jnp.square(layers_in_order({**params, "x": inputs["x"]}, 4, repeats)).mean()

    expected = jax.grad(loss)({name: leaf for name, leaf in inputs.items() if name != "x"})
    for name, leaf in expected.items():
        gradient = results[name.replace("params", "gradients")]
        np.testing.assert_allclose(gradient, leaf, rtol=2e-4, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(("stages", "microbatches", "repeats"), [(2, 8, 1), (4, 2, 2), (4, 8, 4)])
def test_masked_ticks_compute_and_skipped_ones_do_not(stages, microbatches, repeats):
    layer = Layer(width=16, hidden=32, rows=2)
    once = 2 * 2 * layer.rows * layer.width * layer.hidden
    for masked, ticks in ((True, num_ticks(stages, microbatches, repeats)), (False, microbatches * repeats)):
        program = pipeline(stages, microbatches, repeats, layer=layer, masked=masked)
        assert costs(parse(program)).flops == ticks * once


@pytest.mark.parametrize(("looped", "ticks"), [(False, 9), (True, 65)])
def test_published_pipeline_has_the_published_number_of_ticks(looped, ticks):
    permutes = [c for c in costs(parse(uva_pipeline(looped))).collectives if c.kind == "collective_permute"]
    assert sum(c.count for c in permutes) == 2 * ticks
    assert all(c.axes == ("pipe",) for c in permutes)


# Rings


@pytest.mark.parametrize("ring", [True, False])
def test_gathered_matmul_is_the_product_of_the_whole_arrays(ring):
    inputs, results = run(gather_matmul(ring, tokens=16, width=8, hidden=16))
    exact = inputs["x"].astype(np.float32) @ inputs["kernel"].astype(np.float32)
    np.testing.assert_allclose(results["y"].astype(np.float32), exact, rtol=0.02, atol=0.01)


def test_ring_sends_seven_chunks_and_the_gather_as_many_bytes_at_once():
    ring, plain = (costs(parse(gather_matmul(ring))).collectives for ring in (True, False))
    assert [(c.kind, c.count) for c in ring] == [("collective_permute", 7)]
    assert [(c.kind, c.count) for c in plain] == [("all_gather", 1)]
    assert 7 * ring[0].wire_bytes == plain[0].wire_bytes == 7 / 8 * 4096 * 4096 * 2

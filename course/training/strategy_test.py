"""The compiler's own partitioning: the loss and gradient of one device on every mesh, with parameters in parts."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from course.mesh import make_mesh
from course.model import full_loss
from course.training.strategy import ModelSizes, StrategyOptions, compiler
from course.training.text import place, read_text, rows, starts

SIZES = ModelSizes(width=16, hidden=32, num_layers=2, num_heads=4, seq=8)
TEXT, AT = read_text(), starts(0, 0, batch=16, seq=8, length=10_000)
PARAMS = jax.jit(SIZES.model().init)(jax.random.key(0))
EXPECTED = jax.jit(jax.value_and_grad(lambda p: full_loss(SIZES.model(), p, rows(TEXT, AT, 8))))(PARAMS)


def on(mesh, **options):
    strategy = compiler(SIZES, mesh, StrategyOptions(**options))
    params = jax.tree.map(lambda leaf, s: jax.device_put(leaf, NamedSharding(mesh, s)), PARAMS, strategy.specs)
    return strategy, params, place(TEXT, AT, 8, mesh, strategy.batch_spec)


@pytest.mark.parametrize(
    "axes, options",
    [
        ({"data": 8}, {"min_size": 256}),
        ({"data": 2, "pipe": 1, "tensor": 4}, {"num_microbatches": 4, "remat": True, "min_size": 256}),
    ],
    ids=str,
)
def test_loss_and_gradient_are_those_of_one_device(axes, options):
    strategy, params, batch = on(make_mesh(axes), **options)
    compiled = jax.jit(strategy.loss_and_gradients).lower(params, batch).compile()
    assert (compiled.as_text() or "").count("all-gather(") >= 4  # of weights; the rows stay in place
    loss, gradients = compiled(params, batch)
    assert float(loss) == pytest.approx(float(EXPECTED[0]), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-6), gradients, EXPECTED[1])


def test_every_large_leaf_is_split_over_data_and_matrices_over_tensor_as_well():
    mesh = make_mesh({"data": 2, "tensor": 4})
    strategy, params, _ = on(mesh, min_size=256)
    assert strategy.specs["layers"]["mlp"]["up"] == {"kernel": P(None, "data", "tensor"), "bias": P(None, "tensor")}
    assert strategy.specs["layers"]["attention_norm"]["scale"] == P()
    resident = sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(params))
    assert resident < 1.2 * sum(leaf.size for leaf in jax.tree.leaves(PARAMS)) / 8


def test_bfloat16_computes_in_bfloat16_and_keeps_gradients_in_float32():
    strategy, params, batch = on(make_mesh({"data": 2}), dtype="bfloat16")
    # Norms and softmax convert bfloat16 to float32 and back, so tracing and lowering need standard promotion.
    with jax.numpy_dtype_promotion("standard"):
        lowered = jax.jit(strategy.loss_and_gradients).lower(params, batch)
    products = [line for line in lowered.as_text().splitlines() if "dot_general" in line]
    assert products and all("bf16>" in line.split(":")[-1] for line in products)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(lowered.out_info)} == {"float32"}


@pytest.mark.parametrize(
    "axes, message",
    [({"pipe": 2}, "data and tensor, but the mesh has pipe=2: XLA's"), ({"tensor": 8}, "num_heads 4 is not")],
)
def test_meshes_that_it_cannot_use_are_refused(axes, message):
    with pytest.raises(ValueError, match=message):
        compiler(SIZES, make_mesh(axes), StrategyOptions())


def test_invalid_sizes_and_options_are_refused():
    for make, message in (
        (lambda: ModelSizes(num_heads=3), "not divisible"),
        (lambda: ModelSizes(seq=0), "at least 1"),
        (lambda: StrategyOptions(dtype="float8"), "one of: float32, bfloat16"),
        (lambda: StrategyOptions(num_microbatches=0), "at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_model_flops_are_those_of_the_courses_measurements():
    from course.validation.single_device import Sizes as Published

    published = Published(num_layers=12, width=1024, num_heads=8, vocabulary=256, sequence=512, batch=1)
    ours = ModelSizes(width=1024, hidden=4096, num_layers=12, num_heads=8, seq=512)
    assert 512 * ours.model_flops == published.model_flops

"""The schedule, the leaves with weight decay, and clipping by the norm of whole arrays on every mesh."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from course.mesh import make_mesh
from course.model import transformer
from course.training.optimizer import OptimizerSchedule, decays, learning_rate, make_optimizer, state_specs, update

MODEL = transformer(width=8, hidden=16, num_layers=2, num_heads=2, vocab=16, max_seq=4)
SHAPES = jax.eval_shape(MODEL.init, jax.random.key(0))


def test_learning_rate_rises_and_falls():
    rate = learning_rate(OptimizerSchedule(steps=100, learning_rate=0.5, warmup=10, final=0.2))
    rates = [np.asarray(rate(i)) for i in (0, 5, 10, 55, 100, 200)]
    np.testing.assert_allclose(rates, [0, 0.25, 0.5, 0.3, 0.1, 0.1], rtol=1e-6)
    assert learning_rate(OptimizerSchedule(steps=10, learning_rate=0.5, warmup=0))(0) == 0.5


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"steps": 0}, "at least 1"),
        ({"warmup": 9}, "less than the 9 steps"),
        ({"learning_rate": float("nan")}, "positive"),
        ({"clip": 0.0}, "positive"),
        ({"final": 1.5}, "share"),
        ({"weight_decay": -1.0}, "0 or more"),
        ({"beta2": 1.0}, "below 1"),
    ],
)
def test_invalid_schedules_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        OptimizerSchedule(**{"steps": 9, "warmup": 1, **wrong})


def test_matrices_decay_and_norms_biases_embeddings_and_positions_do_not():
    decayed = {
        jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in jax.tree.leaves_with_path(decays(SHAPES))
    }
    of_layers = {f"layers/{name}/kernel" for name in ("attention/qkv", "attention/out", "mlp/up", "mlp/down")}
    assert {name for name, does in decayed.items() if does} == {*of_layers, "head/out/kernel"}
    assert len(decayed) == 13 and len(SHAPES["layers"]["mlp"]["up"]["bias"].shape) == 2


def test_decay_is_decoupled_and_of_the_requested_size():
    schedule = OptimizerSchedule(steps=10, learning_rate=0.1, warmup=0, weight_decay=0.5)
    params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    optimizer = make_optimizer(schedule)
    after, _, norm = update(optimizer, params, optimizer.init(params), jax.tree.map(jnp.zeros_like, params))
    np.testing.assert_allclose(after["kernel"], 1 - 0.1 * 0.5)
    np.testing.assert_allclose(after["bias"], 1)
    assert float(norm) == 0


def gradients_of(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32), SHAPES)


def sharded(tree, mesh):
    """Matrices split over every axis that divides one of their dims; vectors whole, with a copy on each device."""

    def spec(leaf):
        dims = [None] * leaf.ndim
        for i, (name, size) in enumerate(mesh.shape.items(), 1):
            if 1 < leaf.ndim >= i and leaf.shape[-i] % size == 0:
                dims[-i] = name
        return P(*dims)

    specs = jax.tree.map(spec, tree)
    return jax.tree.map(lambda leaf, s: jax.device_put(leaf, NamedSharding(mesh, s)), tree, specs), specs


@pytest.mark.parametrize("axes", [{"tensor": 4, "data": 2}, {"data": 2, "pipe": 2, "tensor": 2}])
def test_clipping_takes_the_global_norm_with_each_element_counted_once(axes):
    gradients, mesh = gradients_of(1), make_mesh(axes)
    expected = np.sqrt(sum(np.sum(leaf.astype(np.float64) ** 2) for leaf in jax.tree.leaves(gradients)))
    clip = optax.clip_by_global_norm(1.0)
    placed, _ = sharded(gradients, mesh)
    assert {leaf.is_fully_replicated for leaf in jax.tree.leaves(placed)} == {True, False}
    clipped, norm = jax.jit(lambda g: (clip.update(g, clip.init(g))[0], optax.tree.norm(g)))(placed)
    assert float(norm) == pytest.approx(expected, rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b / expected, rtol=1e-4, atol=1e-7), clipped, gradients)


def test_inside_shard_map_the_same_call_would_be_wrong():
    gradients, mesh = gradients_of(1), make_mesh({"data": 8})
    placed, specs = sharded(gradients, mesh)

    @partial(jax.shard_map, mesh=mesh, in_specs=(specs,), out_specs=P("data"))
    def local(blocks):
        return optax.tree.norm(blocks)[None]

    norms = np.asarray(jax.jit(local)(placed))
    expected = float(optax.tree.norm(gradients))
    assert (np.abs(norms - expected) > 0.5 * expected).all()


def test_the_state_is_laid_out_as_its_parameters_are():
    _, specs = sharded(gradients_of(0), make_mesh({"data": 8}))
    optimizer = make_optimizer(OptimizerSchedule(steps=200))
    state = jax.eval_shape(optimizer.init, SHAPES)
    state_layout = state_specs(optimizer, SHAPES, specs)
    assert jax.tree.structure(state) == jax.tree.structure(state_layout, is_leaf=lambda s: isinstance(s, P))
    adam = state_layout[1][0]
    assert adam.mu == specs and adam.nu == specs and adam.count == P()

"""The oracles themselves: their gradients are compared with central differences before anything relies on them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from course.data import regression_batch, token_batch
from course.mesh import emulate_devices, make_mesh
from course.model import Attention, full_loss, layer_key, mlp, rms_norm, split_heads, transformer
from course.train import make_train_step

MODELS = {
    "mlp": (
        mlp(width=8, hidden=16, num_layers=2, num_inputs=4, num_outputs=3),
        regression_batch(0, 0, batch=4, num_inputs=4, num_outputs=3),
    ),
    "transformer": (
        transformer(width=8, hidden=16, num_layers=2, num_heads=2, vocab=11, max_seq=6),
        token_batch(0, 0, batch=4, seq=6, vocab=11),
    ),
    "side by side": (
        transformer(width=8, hidden=16, num_layers=1, num_heads=2, vocab=11, max_seq=6, parallel=True),
        token_batch(0, 0, batch=4, seq=6, vocab=11),
    ),
}


# jax.nn.dot_product_attention computes its softmax in float32, so its differences need a larger step.
@pytest.mark.parametrize(
    ("name", "step", "tolerance"), [("mlp", 1e-5, 1e-6), ("transformer", 3e-3, 1e-3), ("side by side", 3e-3, 1e-3)]
)
def test_gradient_of_every_leaf_equals_central_differences(name, step, tolerance):
    model, batch = MODELS[name]
    # Standard promotion: flax's norms mix in float32 epsilons.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), model.init(jax.random.key(0)))
        batch = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64) if a.dtype == np.float32 else a, batch)
        loss = jax.jit(lambda p: full_loss(model, p, batch))
        gradients = jax.grad(loss)(params)
        for (path, leaf), gradient in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(gradients), strict=True):
            direction = np.random.default_rng(leaf.size).standard_normal(leaf.shape)
            direction = jnp.asarray(direction / np.linalg.norm(direction))

            def along(step, path=path, direction=direction):
                moved = jax.tree.map_with_path(lambda p, x: x + step * direction if p == path else x, params)
                return loss(moved)

            difference = (along(step) - along(-step)) / (2 * step)
            assert jnp.vdot(gradient, direction) == pytest.approx(
                float(difference), rel=tolerance, abs=tolerance / 100
            ), path


@pytest.mark.parametrize("name", MODELS)
def test_the_key_may_be_named_as_in_the_docstring(name):
    model, batch = MODELS[name]
    params = model.init(jax.random.key(1))
    x = model.embed(params["embed"], jnp.asarray(batch["inputs"]))
    layer = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    key = jax.random.key(2)
    np.testing.assert_array_equal(model.layer(layer, x, key=key), model.layer(layer, x, key))


@pytest.mark.parametrize("name", MODELS)
def test_loss_is_the_mean_over_rows(name):
    model, batch = MODELS[name]
    params = model.init(jax.random.key(1))
    halves = [
        full_loss(model, params, jax.tree.map(lambda a, part=part: a[part], batch)) for part in (slice(2), slice(2, 4))
    ]
    assert full_loss(model, params, batch) == pytest.approx(float(sum(halves)) / 2, rel=1e-5)


def test_attention_does_not_look_ahead():
    attention = MODELS["transformer"][0]
    params = attention.init(jax.random.key(0))
    layer = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    x = jax.random.normal(jax.random.key(1), (1, 6, 8))
    changed = attention.layer(layer, x.at[:, 4].add(1.0))
    assert jnp.allclose(attention.layer(layer, x)[:, :4], changed[:, :4], atol=1e-6)
    assert not jnp.allclose(attention.layer(layer, x)[:, 4], changed[:, 4], atol=1e-3)


def test_heads_that_do_not_divide_the_width_are_refused():
    from flax import nnx

    with pytest.raises(ValueError, match="width 10 is not divisible by num_heads 4"):
        Attention(10, 4, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", MODELS)
def test_training_lowers_the_loss(name):
    model, batch = MODELS[name]
    optimizer = optax.adam(1e-2)
    params = model.init(jax.random.key(0))
    step, state = make_train_step(model, optimizer), optimizer.init(params)
    losses = []
    for _ in range(20):
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]


def test_batches_follow_from_seed_and_step():
    for make in (
        lambda seed, step: regression_batch(seed, step, batch=2, num_inputs=3, num_outputs=2),
        lambda seed, step: token_batch(seed, step, batch=2, seq=5, vocab=7),
    ):
        assert all(np.array_equal(a, b) for a, b in zip(make(1, 2).values(), make(1, 2).values(), strict=True))
        assert not np.array_equal(make(1, 2)["inputs"], make(1, 3)["inputs"])


def test_mesh_that_needs_more_devices_than_there_are_is_refused():
    with pytest.raises(ValueError, match="needs 16 devices and there are 8"):
        make_mesh({"data": 16})


def test_emulating_another_number_of_devices_after_the_start_asks_for_a_restart():
    jax.devices()
    emulate_devices(8)
    with pytest.raises(RuntimeError, match="Restart the kernel"):
        emulate_devices(4)


DROPPING = {
    "mlp": mlp(width=8, hidden=16, num_layers=2, num_inputs=4, num_outputs=3, dropout=0.5),
    "transformer": transformer(width=8, hidden=16, num_layers=2, num_heads=2, vocab=11, max_seq=6, dropout=0.5),
}


@pytest.mark.parametrize("name", DROPPING)
def test_nothing_is_dropped_without_a_key_or_a_rate(name):
    model, batch = MODELS[name]
    params, key = model.init(jax.random.key(1)), jax.random.key(2)
    loss = full_loss(model, params, batch)
    assert full_loss(model, params, batch, key) == loss
    assert full_loss(DROPPING[name], params, batch) == loss
    assert full_loss(DROPPING[name], params, batch, key) != loss


def test_dropout_keeps_the_input_and_scales_up_the_elements_it_keeps():
    model, x = DROPPING["mlp"], jax.random.normal(jax.random.key(3), (256, 8))
    params = jax.tree.map(lambda leaf: leaf[0], model.init(jax.random.key(1))["layers"])
    whole, dropped = (model.layer(params, x, key) - x for key in (None, jax.random.key(4)))
    kept = dropped != 0
    assert float(kept.mean()) == pytest.approx(0.5, abs=0.03)
    np.testing.assert_allclose(dropped, jnp.where(kept, 2 * whole, 0), atol=1e-6)


def test_keys_of_layers_differ_by_microbatch_and_layer_and_agree_with_the_loss_on_one_device():
    model, (_, batch) = DROPPING["mlp"], MODELS["mlp"]
    key, params = jax.random.key(5), model.init(jax.random.key(1))
    keys = {tuple(jax.random.key_data(layer_key(key, m, i)).tolist()) for m in range(4) for i in range(4)}
    assert len(keys) == 16
    x = model.embed(params["embed"], jnp.asarray(batch["inputs"]))
    for i in range(model.num_layers):
        x = model.layer(jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]), x, layer_key(key, 3, i))
    by_hand = model.loss(params["head"], x, jnp.asarray(batch["targets"]))
    assert full_loss(model, params, batch, jax.random.fold_in(key, 3)) == pytest.approx(float(by_hand), rel=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_a_masked_loss_is_the_mean_over_the_mask_and_zero_if_the_mask_is_empty(name):
    model, batch = MODELS[name]
    params, shape = model.init(jax.random.key(1)), batch["targets"].shape[: 1 if name == "mlp" else 2]
    batch = jax.tree.map(jnp.asarray, batch)
    masks = [jnp.zeros(shape).at[place].set(1) for place in ((0,) * len(shape), (-1,) * len(shape))]
    losses = [full_loss(model, params, batch | {"mask": mask}) for mask in (*masks, sum(masks))]
    assert float(losses[2]) == pytest.approx(float((losses[0] + losses[1]) / 2), rel=1e-5)
    assert full_loss(model, params, batch | {"mask": jnp.zeros(shape)}) == 0
    whole = full_loss(model, params, batch | {"mask": jnp.ones(shape)})
    assert float(whole) == pytest.approx(float(full_loss(model, params, batch)), rel=1e-5)


def test_named_parts_of_a_layer_compute_the_same_as_the_layer():
    """The split parts of tensor parallelism: the norm as a function, and attention with a separate heads dim."""
    model = MODELS["transformer"][0]
    params = jax.jit(model.init)(jax.random.key(4))
    layer = jax.tree.map(lambda leaf: leaf[1] + 0.1, params["layers"])
    x = jax.random.normal(jax.random.key(5), (3, 6, 8))
    norm = nnx.RMSNorm(8, rngs=nnx.Rngs(0))
    nnx.update(norm, {"scale": layer["mlp"]["norm"]["scale"]})
    np.testing.assert_allclose(rms_norm(layer["mlp"]["norm"], x), norm(x), rtol=1e-6)

    heads = split_heads(layer["attention"], 2)
    q, k, v = jnp.einsum("bsw,wthd->tbshd", rms_norm(layer["attention_norm"], x), heads["qkv"]["kernel"])
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + jnp.einsum("bshd,hdw->bsw", mixed, heads["out"]["kernel"])
    up, down = (layer["mlp"][name] for name in ("up", "down"))
    hidden = jax.nn.gelu(rms_norm(layer["mlp"]["norm"], x) @ up["kernel"] + up["bias"])
    expected = model.layer(layer, jax.random.normal(jax.random.key(5), (3, 6, 8)))
    np.testing.assert_allclose(x + hidden @ down["kernel"] + down["bias"], expected, rtol=2e-5, atol=2e-6)
    stacked = split_heads(params["layers"]["attention"], 2)
    assert stacked["qkv"]["kernel"].shape == (2, 8, 3, 2, 4) and stacked["out"]["kernel"].shape == (2, 2, 4, 8)

"""Samples: drawn from the predicted distribution, the same for the same seed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from course.mesh import make_mesh
from course.training.sample import sample, whole
from course.training.strategy import ModelSizes

SIZES = ModelSizes(width=16, hidden=32, num_layers=1, num_heads=2, seq=8)
PARAMS = jax.jit(SIZES.model().init)(jax.random.key(0))


def preferring(byte, strength):
    """Parameters of a model that expects one byte everywhere, and a second one half as often."""
    bias = jnp.zeros(256).at[byte].set(strength).at[byte + 1].set(strength - np.log(2))
    zero = jax.tree.map(jnp.zeros_like, PARAMS)
    return {**zero, "head": {**zero["head"], "out": {**zero["head"]["out"], "bias": bias}}}


def test_a_sample_goes_on_from_its_prompt_past_the_end_of_the_window():
    text = sample(SIZES, PARAMS, b"ROMEO:", length=20, seed=1)
    assert text.startswith(b"ROMEO:") and len(text) == 26
    assert text == sample(SIZES, PARAMS, b"ROMEO:", length=20, seed=1)
    assert text != sample(SIZES, PARAMS, b"ROMEO:", length=20, seed=2)


def test_bytes_are_drawn_as_often_as_the_model_expects_them():
    def drawn(temperature):
        return b"".join(
            sample(SIZES, preferring(97, 30.0), b"x", length=25, seed=seed, temperature=temperature)[1:]
            for seed in range(24)
        )

    text = drawn(1.0)
    assert set(text) == {97, 98} and 0.55 < text.count(97) / 600 < 0.78
    assert drawn(0.1).count(97) > 590


def test_each_byte_is_predicted_from_the_bytes_before_it_as_in_training():
    params = jax.tree.map(lambda leaf: 3 * leaf, PARAMS)
    text = sample(SIZES, params, b"abcdefghijkl", length=14, seed=0, temperature=1e-4)
    model, tokens = SIZES.model(), np.frombuffer(text, np.uint8).astype(np.int32)
    windows = jnp.asarray(np.stack([tokens[i - 8 : i] for i in range(12, 26)]))

    @jax.jit
    def losses(byte):
        """The loss of one byte after each window."""
        x = model.embed(params["embed"], windows)
        x = model.layer(jax.tree.map(lambda leaf: leaf[0], params["layers"]), x)[:, -1:]
        return jax.vmap(lambda activation: model.loss(params["head"], activation[None], byte[None, None]))(x)

    best = np.argmin([losses(jnp.int32(byte)) for byte in range(256)], axis=0)
    np.testing.assert_array_equal(best, tokens[12:])


def test_parameters_in_parts_are_put_together_on_one_device():
    mesh = make_mesh({"data": 8})
    parts = {"a": jax.device_put(np.arange(16.0), jax.NamedSharding(mesh, jax.P("data")))}
    (leaf,) = jax.tree.leaves(whole(parts, mesh))
    np.testing.assert_array_equal(leaf, np.arange(16.0))
    assert len(leaf.devices()) == 1


def test_invalid_prompts_and_temperatures_are_refused():
    with pytest.raises(ValueError, match="prompt is empty"):
        sample(SIZES, PARAMS, b"", length=1, seed=0)
    with pytest.raises(ValueError, match="temperature is 0"):
        sample(SIZES, PARAMS, b"a", length=1, seed=0, temperature=0)

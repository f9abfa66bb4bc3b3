"""Typical mistakes in ``single_device``, and the messages that they must get."""

from autograder.proof.mistakes import CANNOT_BRANCH, Mistake

MISTAKES = [
    Mistake(
        "scan_layers",
        "result of the scan returned whole",
        r"a tuple",
        {"x, _ = lax.scan": "x = lax.scan"},
        line="return x",
    ),
    Mistake(
        "scan_layers",
        "what is stacked before the carry",
        r"comes into the loop's body as its carry and None goes out.*\(carry, what is stacked\), in this order",
        {"(layer(params, x), None)": "(None, layer(params, x))"},
        line="x, _ = lax.scan(lambda x, params: (None, layer(params, x)), x, stacked_params)",
        never="tuple of two",
    ),
    Mistake(
        "scan_layers",
        "Python loop over the layers",
        r"grows with",
        {
            "x, _ = lax.scan(lambda x, params: (layer(params, x), None), x, stacked_params)": (
                "for i in range(len(jax.tree.leaves(stacked_params)[0])):\n"
                "        x = layer(jax.tree.map(lambda leaf: leaf[i], stacked_params), x)"
            )
        },
        never="def scan_layers",
    ),
    Mistake(
        "scaled_step",
        "gradients not divided by the scale",
        r"gradients|values",
        {'lambda g: g / state["scale"]': "lambda g: g"},
        never="def scaled_step",
    ),
    Mistake(
        "scaled_step",
        "if on whether gradients are finite",
        CANNOT_BRANCH,
        {"jnp.where(finite, p - learning_rate * g, p)": "p - learning_rate * g if finite else p"},
        line="params = jax.tree.map(lambda p, g: p - learning_rate * g if finite else p, params, gradients)",
    ),
    Mistake(
        "scaled_step",
        "no floor under the scale",
        r"scale in the case .* it is first wrong at step 0, counted from 0: measured 0.5, expected 1\..*never below 1",
        {'jnp.maximum(state["scale"] / 2, 1)': 'state["scale"] / 2'},
    ),
    Mistake(
        "scaled_step",
        "counter that goes on after a skipped step",
        r"good steps in the case .* it is first wrong at step \d.*from 0 again after a skipped step",
        {'jnp.where(finite, state["good_steps"] + 1, 0)': 'state["good_steps"] + 1'},
        never="which part is never written",
    ),
    Mistake(
        "chunked_attention",
        "sum that is not rescaled",
        r"what happens to the sum and to the values so far when a later chunk has a larger score",
        {"total = total * shrink": "total = total"},
    ),
    Mistake(
        "chunked_attention",
        "maximum that begins at 0",
        r"NaN.*Which maximum is −∞ when it is subtracted, or 0 where all scores are far below 0",
        {"nothing - jnp.inf": "nothing"},
    ),
    Mistake(
        "chunked_attention",
        "dim of the maximum not kept",
        r"shapes?.*\d",
        {"scores - now[..., None]": "scores - now"},
        line="weights, shrink = jnp.exp(scores - now), jnp.exp(largest - now)",
    ),
    Mistake(
        "mixed_precision_loss",
        "dtypes mixed",
        r"of f32 x f32.*another dtype",
        {'@ low(layer["out"])': '@ layer["out"]'},
        line='x = x + mixed.reshape(x.shape) @ layer["out"]',
    ),
    Mistake(
        "accumulate_gradients",
        "sum for mean",
        r"times too large.*microbatches",
        {"leaf / num_microbatches, total": "leaf, total"},
        never="def accumulate_gradients",
    ),
    Mistake(
        "remat_layers",
        "checkpoint left out",
        r"at the peak 13\.84 GiB of .* 1\.00 times the naive baseline's.*Which of it is cheap to compute again",
        {"    @jax.checkpoint\n    def step(x, params):\n        return": "    def step(x, params):\n        return"},
        line="x, _ = lax.scan(step, x, stacked_params)",
    ),
]

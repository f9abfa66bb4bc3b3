"""Typical mistakes in ``single_device``, and the messages that they must get."""

from autograder.proof.mistakes import CANNOT_BRANCH, EDITED, Mistake

MISTAKES = {
    "scan_layers": {
        "result of the scan returned whole": Mistake(r"a tuple", {"x, _ = lax.scan": "x = lax.scan"}, line="return x"),
        "what is stacked before the carry": Mistake(
            r"comes into the loop's body as its carry and None goes out.*\(carry, what is stacked\), in this order",
            {"(layer(params, x), None)": "(None, layer(params, x))"},
            EDITED,
            never="tuple of two",
        ),
        "Python loop over the layers": Mistake(
            r"grows with",
            {
                "x, _ = lax.scan(lambda x, params: (layer(params, x), None), x, stacked_params)": (
                    "for i in range(len(jax.tree.leaves(stacked_params)[0])):\n"
                    "        x = layer(jax.tree.map(lambda leaf: leaf[i], stacked_params), x)"
                )
            },
        ),
    },
    "scaled_step": {
        "gradients not divided by the scale": Mistake(
            r"gradients|values", {'lambda g: g / state["scale"]': "lambda g: g"}
        ),
        "if on whether gradients are finite": Mistake(
            CANNOT_BRANCH,
            {"jnp.where(finite, p - learning_rate * g, p)": "p - learning_rate * g if finite else p"},
            EDITED,
        ),
        "no floor under the scale": Mistake(
            r"scale in the case .* it is first wrong at step 0, counted from 0: measured 0.5, expected 1\."
            r".*never below 1",
            {'jnp.maximum(state["scale"] / 2, 1)': 'state["scale"] / 2'},
        ),
        "counter that goes on after a skipped step": Mistake(
            r"good steps in the case .* it is first wrong at step \d.*starts from 0 again after a skipped step",
            {'jnp.where(finite, state["good_steps"] + 1, 0)': 'state["good_steps"] + 1'},
            never="which part is never written",
        ),
    },
    "chunked_attention": {
        "sum that is not rescaled": Mistake(
            r"what happens to the sum and to the values so far when a later chunk has a larger score",
            {"total = total * shrink": "total = total"},
        ),
        "maximum that begins at 0": Mistake(
            r"NaN.*Which maximum is −∞ when it is subtracted, or 0 where all scores are far below 0",
            {"nothing - jnp.inf": "nothing"},
        ),
        "dim of the maximum not kept": Mistake(r"shapes?.*\d", {"scores - now[..., None]": "scores - now"}, EDITED),
    },
    "mixed_precision_loss": {
        "dtypes mixed": Mistake(r"of f32 x f32.*another dtype", {'@ low(layer["out"])': '@ layer["out"]'}, EDITED)
    },
    "accumulate_gradients": {
        "sum for mean": Mistake(r"times too large.*microbatches", {"leaf / num_microbatches, total": "leaf, total"})
    },
    "remat_layers": {
        "checkpoint left out": Mistake(
            r"at the peak 13\.84 GiB of .* 1\.00 times the naive baseline's.*which part of it is cheap to recompute",
            {"    @jax.checkpoint\n    def step(x, params):": "    def step(x, params):"},
            line="x, _ = lax.scan(step, x, stacked_params)",
        )
    },
}

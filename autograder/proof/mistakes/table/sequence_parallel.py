"""Typical mistakes in ``sequence_parallel``, and the messages that they must get."""

from autograder.proof.mistakes import EDITED, Mistake

MISTAKES = {
    "leave_tensor_region": {
        "a sum that varies": Mistake(
            r"axis 'tensor' has that size.*typed as the same on every device",
            {"else lax.psum(x, axis_name)": "else as_varying(lax.psum(x, axis_name), axis_name)"},
            never="axis 'data'",
        )
    },
    "sp_block": {
        "a number that jax.checkpoint traces": Mistake(
            r"a shape consists of Python numbers.*name them in static_argnums",
            {
                "def into(norm, kernel, x):": "def into(norm, kernel, x, size=1):\n        jnp.zeros((size, 1))",
                ".reshape(width, -1), x)": ".reshape(width, -1), x, x.shape[0])",
            },
            line="jnp.zeros((size, 1))",
        ),
        "one key for all devices": Mistake(
            r"which dropout keys does it use",
            {"jax.random.split(fold_key_over_axes(key, (axis_name,)))": "jax.random.split(key)"},
            never="so the masks are right",
        ),
        "left to JAX": Mistake(
            r"GiB of temporaries are live at once.*Which whole activation is saved before a product",
            {"    @jax.checkpoint\n    def into": "    def into", "    @jax.checkpoint\n    def back": "    def back"},
        ),
        "bias before the scatter": Mistake(
            r"If a whole leaf is wrong: is each device's share",
            {
                "gelu(hidden) @ kernel, axis_name": 'gelu(hidden) @ kernel + mlp["down"]["bias"], axis_name',
                'back(hidden, mlp["down"]["kernel"]) + mlp["down"]["bias"]': 'back(hidden, mlp["down"]["kernel"])',
            },
            never="so the masks are right",
        ),
    },
    "ulysses_attention": {
        "keys for every query head": Mistake(
            r"How many heads of keys and values are sent",
            {"copies = max(1, lax.axis_size(axis_name) // k.shape[2])": "copies = q.shape[2] // k.shape[2]"},
        ),
        "heads tiled": Mistake(
            r"which key head do they use\?", {"jnp.repeat(x, copies, axis=2)": "jnp.tile(x, (1, 1, copies, 1))"}
        ),
    },
    "enter_tensor_region": {
        "joined along the batch": Mistake(
            r"returned float32\[8, 6, 5\] on mesh tensor=4, expected float32\[2, 24, 5\]",
            {"axis=1, tiled=True) if split": "axis=0, tiled=True) if split"},
            EDITED,
        )
    },
    "selective_recompute": {
        "scores kept": Mistake(
            r"2\.312 GiB of temporaries are live at once.*what is cheap to compute again\?",
            {"jax.checkpoint(attend, static_argnums=1)": "attend"},
        ),
    },
}

"""Typical mistakes in ``tp_transformer``, and the messages that they must get."""
# ruff: noqa: E501  edits and quoted lines keep the length that they have in a notebook

from autograder.proof.mistakes import Mistake

MISTAKES = {
    "vocab_parallel_embed": {
        "tokens of other devices not masked": Mistake(
            r"values",
            {"jnp.where(mine[..., None], table[jnp.where(mine, local, 0)], 0)": "table[jnp.where(mine, local, 0)]"},
        )
    },
    "parallel_transformer_block": {
        "bias left out": Mistake(
            r"What is dropped is right, so the masks are right, too; what is not dropped is wrong",
            {' + params["up"]["bias"]': ""},
            never="by chance",
        )
    },
    "tp_transformer_block": {
        "key not split": Mistake(
            r"as two masks of dropout agree by chance: is each mask.*It is right in every case without dropout\.",
            {"drop(y, rate, first)": "drop(y, rate, key)"},
        )
    },
    "vocab_parallel_loss": {
        "each device's own maximum": Mistake(
            r"more is sent than should be\. Begin with “values”.*is the number that you subtract each token's own largest logit",
            {
                "lax.pmax(lax.stop_gradient(jnp.max(logits, axis=-1)), axis_name)": "lax.stop_gradient(jnp.max(logits, axis=-1))"
            },
        ),
        "one maximum for all tokens": Mistake(
            r"of 4 elements, 4 are infinite\. .*is the number that you subtract each token's own largest logit",
            {"jnp.max(logits, axis=-1)": "jnp.max(logits)", "highest[..., None]": "highest"},
        ),
    },
}

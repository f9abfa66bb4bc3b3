"""Typical mistakes in ``expert_parallel``, and the messages that they must get."""

from autograder.proof.mistakes import Mistake

MISTAKES = [
    Mistake(
        "moe_layer",
        "way back with the axes of the way there",
        r"cuts its dim split_axis, here of size 3, into one part for each device on axis tensor, here 2.*"
        r"on mesh expert=8 it runs, and is wrong there, too: see below.*values.*Whose tokens did this expert serve",
        {"split_axis=1, concat_axis=0": "split_axis=0, concat_axis=1"},
        line="returned = lax.all_to_all(computed, axis_name, split_axis=0, concat_axis=1, tiled=True)",
    ),
    Mistake(
        "route",
        "places counted with the token itself",
        r"leaf places .*that are wrong are 1 too large",
        {
            "jnp.minimum(jnp.take_along_axis(before, experts, axis=1), capacity)": (
                "jnp.minimum(jnp.take_along_axis(before + 1, experts, axis=1), capacity)"
            )
        },
        never="has what belongs",
    ),
]

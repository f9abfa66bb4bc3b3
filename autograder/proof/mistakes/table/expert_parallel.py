"""Typical mistakes in ``expert_parallel``, and the messages that they must get."""

from autograder.proof.mistakes import Mistake

MISTAKES = {
    "moe_layer": {
        "way back with the axes of the way there": Mistake(
            r"cuts its dim split_axis, here of size 3, into one part for each device on axis tensor, here 2.*"
            r"on mesh expert=8 it runs.*On mesh expert=8 it is wrong, too: see below.*values.*"
            r"Whose tokens did this expert serve",
            {"split_axis=1, concat_axis=0": "split_axis=0, concat_axis=1"},
            line="returned = lax.all_to_all(computed, axis_name, split_axis=0, concat_axis=1, tiled=True)",
        ),
        "shared expert left out": Mistake(
            r"does every token get the shared expert's output, unscaled\?",
            {'expert_mlp(params["shared"], x) + combine': "combine"},
        ),
        "bias added to the logits": Mistake(
            r"Every row is off by `params/router/bias`, which is added once too often: where should it be added\? Both",
            {
                'logits = x @ params["router"]["kernel"]': (
                    'logits = x @ params["router"]["kernel"] + params["router"]["bias"]'
                )
            },
        ),
    },
    "route": {
        "places counted with the token itself": Mistake(
            r"leaf places .*that are wrong are 1 too large",
            {
                "jnp.minimum(jnp.take_along_axis(before, experts, axis=1), capacity)": (
                    "jnp.minimum(jnp.take_along_axis(before + 1, experts, axis=1), capacity)"
                )
            },
            never="has what belongs",
        ),
        "gates divided by their sum": Mistake(
            r"Which numbers is a gate computed from",
            {
                "return jnp.take_along_axis(gates, experts, axis=1), experts": (
                    "kept = jnp.take_along_axis(gates, experts, axis=1)\n"
                    "    return kept / kept.sum(1, keepdims=True), experts"
                )
            },
        ),
    },
    "balancing_loss": {
        "an expert with its share is taken for a busy one": Mistake(
            r"Along dim 0 \(of size 8\), only indices 0 and 4 are wrong.*what happens to an expert with exactly its",
            {
                "bias + rate * jnp.sign(1 / num_experts - load)": (
                    "jnp.where(load >= 1 / num_experts, bias - rate, bias + rate)"
                )
            },
        ),
        "no bias returned": Mistake(
            r"returned a tuple of 2, expected a tuple \(balance, z, bias\)",
            {"return balance, z, bias + rate * jnp.sign(1 / num_experts - load)": "return balance, z"},
            line="return balance, z",
        ),
        "exponentials that overflow": Mistake(
            r"leaf z .*it is infinite.*what is subtracted before an exponential\?",
            {"jax.nn.logsumexp(logits, axis=1)": "jnp.log(jnp.sum(jnp.exp(logits), axis=1))"},
        ),
        "each device's own balance": Mistake(
            r"A mean of products is not the product of means.*Which factor carries a gradient",
            {
                "lax.psum(jnp.sum(experts.reshape(-1, 1) == jnp.arange(num_experts), axis=0), axes)": (
                    "jnp.sum(experts.reshape(-1, 1) == jnp.arange(num_experts), axis=0)"
                ),
                "bias + rate * jnp.sign(1 / num_experts - load)": (
                    "bias + rate * jnp.sign(1 / num_experts - lax.pmean(load, axes))"
                ),
            },
        ),
        "bias in proportion": Mistake(
            r"By how much does a bias change", {"jnp.sign(1 / num_experts - load)": "(1 / num_experts - load)"}
        ),
    },
    "dispatch": {
        "dropped tokens in the last place": Mistake(
            r"where does a dropped choice go\?.*the gradient in the case.*what does a dropped choice add to it",
            {'mode="drop"': 'mode="clip"'},
        ),
        "no dim for the choices": Mistake(
            r"Incompatible types for broadcasting: input type=float32\[20,12\] and",
            {"add(x[:, None], mode": "add(x, mode"},
            line="add(x, mode",
            never=r"\{V",
        ),
    },
    "combine": {
        "mean over choices": Mistake(
            r"All of it is 2 times too small, and every token has as many choices: mean or sum\?",
            {"jnp.sum(gates[:, :, None] * each, axis=1)": "jnp.mean(gates[:, :, None] * each, axis=1)"},
        )
    },
    "moe_step": {
        "experts averaged over both axes": Mistake(
            r"4 times too large, and axis 'expert' has that size: sum or mean",
            {"lax.pmean(gradient, data_axis) / lax.axis_size(expert_axis)": "lax.pmean(gradient, data_axis)"},
            never="which part does each device take",
        ),
        "no balance in the loss": Mistake(
            r"does it include both losses of the router, with their weights",
            {" + model.balance * jnp.mean(balance)": ""},
        ),
    },
    "overlapped_moe": {
        "shared expert left out": Mistake(
            r"leaf params/shared/down on mesh expert=8: .* All of it is zero",
            {"return shared + combine": "return combine"},
        )
    },
}

"""Typical mistakes in ``schedules``, and the messages that they must get."""
# ruff: noqa: E501  edits and quoted lines keep the length that they have in a notebook

from autograder.proof.mistakes import EDITED, Mistake

MISTAKES = {
    "one_f_one_b": {
        "one text for all stages": Mistake(
            r"Expected a tuple with a line of text for each stage", {"return tuple(lines)": 'return "\\n".join(lines)'}
        ),
        "all stages begin as many microbatches": Mistake(
            r"is enough\. Stage 1 begins with 4 forward passes: "
            r"which of them could come after its first backward pass\?.*1F1B: one forward, one backward, then flush",
            {"min(num_stages - stage, num_microbatches)": "min(num_stages, num_microbatches)"},
            never="had it started enough",
        ),
        "one microbatch too many in flight": Mistake(
            r"which microbatch does it begin that could wait for the backward pass of an earlier one\?",
            {"min(num_stages - stage, num_microbatches)": "min(num_stages - stage + 1, num_microbatches)"},
        ),
    },
    "interleaved": {
        "an error where stages do not divide the microbatches": Mistake(
            r"ZeroDivisionError.*\(in the call interleaved\(\d+, \d+, \d+\)\)",
            {
                '        raise ValueError(f"{num_microbatches} microbatches cannot go': (
                    '        1 / 0\n        raise ValueError(f"{num_microbatches} microbatches cannot go'
                )
            },
            line="1 / 0",
        ),
        "an order where none is possible": Mistake(
            r"cannot go round in groups of 4: raise a ValueError", {"raise ValueError(": "str("}, never="no cost"
        ),
        "parts backward in the order of the forward passes": Mistake(
            r"This order: stages would wait forever: stage 0 waits in",
            {'repeat if kind == "F" else num_repeats - 1 - repeat': "repeat"},
            never="your order",
        ),
    },
    "split_backward": {
        "product of the forward pass computed again": Mistake(
            r"Which product is computed again",
            {'jax.vjp(activation, saved["z"])': 'jax.vjp(activation, saved["x"] @ weights["up"])'},
            never="your line",
        ),
        "a part that is transposed": Mistake(
            r"leaf up .*: backward_weights gives float32\[\d+, \d+\], expected float32\[\d+, \d+\]",
            {'"up": saved["x"].T @ pending["dz"]': '"up": pending["dz"].T @ saved["x"]'},
            line='return {"up": pending["dz"].T',
        ),
    },
    "zero_bubble": {
        "whole backward pass and its half": Mistake(
            r"stage 0 needs one F and one B \(or one I and one W\) of microbatch 0, and has 1 x F, 1 x B, 1 x W",
            {'words.append(f"I{microbatch}")': 'words.append(f"B{microbatch}")'},
        )
    },
    "execute_schedule": {
        "a loss that is the same on all devices": Mistake(
            r"branches of a lax\.switch must return values of the same type.*vary_alike",
            {'"loss": 0 * jnp.sum(example)': '"loss": 0.0'},
            line="state = lax.switch(",
        ),
        "gradients sent on, not back": Mistake(
            r"does its result go to the right neighbour",
            {'state["dx"], axis_name, behind': 'state["dx"], axis_name, ahead'},
        ),
        "sum over microbatches": Mistake(
            r"It is 12 times too large, and there are as many microbatches: sum or mean\?",
            {'loss(y, at["microbatch"]) / len(microbatches)': 'loss(y, at["microbatch"])'},
            never="overwritten",
        ),
        "a loss in every repeat of the last stage": Mistake(
            r"of the last part alone",
            {"last = part == table.num_repeats * num_stages - 1": "last = index == num_stages - 1"},
            never="Follow the first microbatch",
        ),
        "permute inside of a branch": Mistake(
            r"devices would wait for each other forever.*A collective inside a branch must be reached by every device",
            {'{"dx": dx, "pending"': '{"dx": lax.ppermute(dx, axis_name, behind), "pending"'},
            line=EDITED,
        ),
        "permute moved into a branch": Mistake(
            r"devices would wait for each other forever.*A collective inside a branch must be reached by every device",
            {
                'return state | {"dx": dx, "pending"': 'return state | {"dx": lax.ppermute(dx, axis_name, behind), "pending"',
                'y, dx = lax.ppermute(state["y"], axis_name, ahead), lax.ppermute(state["dx"], axis_name, behind)': 'y, dx = lax.ppermute(state["y"], axis_name, ahead), state["dx"]',
            },
            line='return state | {"dx": lax.ppermute(dx, axis_name, behind), "pending"',
        ),
    },
    "two_weight_versions_step": {
        "gradient at the newest version": Mistake(
            r"begin with “values”.*The loss is wrong before anything is updated"
            r".*the sum over all steps\. At which version",
            {'versions["older"], microbatches, pipe_axis)': 'versions["newest"], microbatches, pipe_axis)'},
        ),
        "loss of one pipeline": Mistake(
            r"leaf loss .* in step \d .*All other results are right: over which rows, and over which devices",
            {
                "lax.pmean(lax.psum(jnp.where(last, own, 0), pipe_axis), data_axis)": (
                    "lax.psum(jnp.where(last, own, 0), pipe_axis)"
                )
            },
        ),
        "the older version stays": Mistake(
            r"begin with “gradients”.*which is the older one in the next step\?",
            {'"older": versions["newest"]}': '"older": versions["older"]}'},
        ),
    },
}

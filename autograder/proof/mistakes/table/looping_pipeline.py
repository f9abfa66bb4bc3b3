"""Typical mistakes in ``looping_pipeline``, and the messages that they must get."""
# ruff: noqa: E501  edits and quoted lines keep the length that they have in a notebook

from autograder.proof.mistakes import Mistake

MISTAKES = {
    "execute_looping_pipeline": {
        "nothing waits at stage 0": Mistake(
            r"\(on the device at pipe 3\)\. On device 3, indices 0 to 3 of dim 0 .*With more microbatches than stages, what comes back is early",
            {"waiting[microbatch], arrived)": "jnp.where(repeat == 0, microbatches[microbatch], arrived), arrived)"},
            never="dropout|other devices are right",
        ),
        "inputs that do not wait": Mistake(
            r"Along dim 0 \(of size 6\), only indices 3, 4 and 5 are wrong",
            {"jnp.maximum(t - index, 0)": "t"},
            never="Only devices at",
        ),
        "a function where an array is due": Mistake(
            r"Argument 'the function stage' of type",
            {"y = stage(": "y = lax.stop_gradient(stage)("},
            line="y = lax.stop_gradient(stage)(",
        ),
        "first results kept": Mistake(
            r"Only the last stage's result of the last repeat counts",
            {"outputs[-num_microbatches:]": "outputs[:num_microbatches]"},
            never="dropout",
        ),
        "a repeat begins at once": Mistake(
            r"12 ticks of one stage, and the schedule has 14: does a repeat begin before its first microbatch is back",
            {"period = max(num_microbatches, num_stages)": "period = num_microbatches"},
        ),
    },
    "looping_train_step": {
        "sum that does not vary as what it belongs to": Mistake(
            r"backward rule of this jax\.custom_vjp.*\{V:pipe\} where.*\{V:\(data,pipe\)\}.*as_varying",
            {"as_varying(lax.psum(g, data_axis), data_axis)": "lax.psum(g, data_axis)"},
        ),
        "key without the repeat": Mistake(
            r"It is right in every case without dropout: is each mask drawn in the specified shape, and from the specified key",
            {"layer_key(key, microbatch, number)": "layer_key(key, microbatch, index * layers_per_stage + j)"},
        ),
    },
    "layers_of_stage": {
        "refused by an assertion": Mistake(
            r"AssertionError: 7 layers cannot be shared evenly.*in the call layers_of_stage\(3, 4, 2, 7\); only ValueError counts as a refusal",
            {"raise ValueError(": "raise AssertionError("},
            line="raise AssertionError(",
        ),
        "no refusal": Mistake(
            r"cannot be shared evenly by \d stages? in \d repeats?: raise a ValueError that says how many were given",
            {"if num_layers % visits:": "if False:"},
        ),
        "error without the numbers": Mistake(
            r"how many layers",
            {
                'f"{num_layers} layers cannot be shared evenly by {num_stages} stages in {num_repeats} repeats: "\n': '"layers cannot be shared evenly"\n',
                'f"their number must be a multiple of {visits}"\n': "\n",
            },
        ),
        "neighbouring layers together": Mistake(
            r"Follow one microbatch", {"(repeat * num_stages + stage) * each": "(stage * num_repeats + repeat) * each"}
        ),
    },
    "loop_position": {
        "stage 0 idle in tick 0": Mistake(
            r"at tick 0, stage 0 .*which microbatch enters here, or has come back from the last stage\?",
            {"if tick < stage:": "if tick <= stage:"},
            never="the stage before it",
        ),
        "off by one": Mistake(
            r"yours: tick.* stage 0 1 2 .* right: tick.* stage 0 0 1",
            {"divmod(tick - stage, max": "divmod(tick - stage + 1, max"},
        ),
        "microbatch and repeat swapped": Mistake(
            r"right numbers the other way round.*yours: tick.* stage 0 0 0' 0'' ",
            {"return (microbatch, repeat) if": "return (repeat, microbatch) if"},
        ),
        "repeats as long as there are microbatches": Mistake(
            r"yours: tick.* stage 0 0 1 0' 1' .* right: tick.* stage 0 0 1 \. \. 0' 1'",
            {"max(num_microbatches, num_stages)": "num_microbatches"},
        ),
    },
}

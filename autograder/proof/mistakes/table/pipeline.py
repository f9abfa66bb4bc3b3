"""Typical mistakes in ``pipeline``, and the messages that they must get."""
# ruff: noqa: E501  edits and quoted lines keep the length that they have in a notebook

from autograder.proof.mistakes import CANNOT_BRANCH, EDITED, Mistake

MISTAKES = {
    "split_microbatches": {
        "error without the numbers": Mistake(
            r"both numbers|(names?|says?).*num_microbatches",
            {'f"{rows} rows cannot be split into {num_microbatches} equal microbatches"': '"not divisible"'},
        ),
        "no error for rows that are left over": Mistake(
            r"raised no error",
            {
                "if rows % num_microbatches:": "if False:",
                "return leaf.reshape(num_microbatches, rows // num_microbatches,": "return leaf[: rows // num_microbatches * num_microbatches].reshape(num_microbatches, rows // num_microbatches,",
            },
        ),
        "rows interleaved": Mistake(
            r"index \[0, 1\] has what belongs at index",
            {
                "return leaf.reshape(num_microbatches, rows // num_microbatches, *leaf.shape[1:])": "return leaf.reshape(rows // num_microbatches, num_microbatches, *leaf.shape[1:]).swapaxes(0, 1)"
            },
        ),
    },
    "pipeline_tick": {
        "one result instead of two": Mistake(
            r"expected a tuple \(y, sent\)", {"return y, lax.ppermute": "return lax.ppermute"}
        ),
        "if on the stage's number": Mistake(
            CANNOT_BRANCH,
            {
                "stage(jnp.where(number == 0, entering, arrived), tick - number)": "stage(entering if number == 0 else arrived, tick - number)"
            },
            EDITED,
        ),
        "microbatch's number without the stage": Mistake(
            r"yours:.* stage 1 \. 1 2 3 .* right:.* stage 1 \. 0 1 2", {"tick - number)": "tick)"}
        ),
        "every stage takes microbatches": Mistake(
            r"stage 1 \. 0\* 1\* 2\*",
            {
                "jnp.where(number == 0, entering, arrived)": "microbatches[jnp.clip(tick - number, 0, microbatches.shape[0] - 1)]"
            },
        ),
        "sends to the stage before": Mistake(
            r"On device 1, index 2 of dim 1 has what belongs at index 2 on device 3",
            {"[(i, i + 1) for i in range(num_stages - 1)]": "[(i + 1, i) for i in range(num_stages - 1)]"},
        ),
    },
    "execute_pipeline": {
        "stubbed tick": Mistake(
            r"pipeline_tick.* not written yet", inside="pipeline_tick", never="execute_pipeline is not written yet"
        ),
        "one tick too many": Mistake(
            r"in 1 of its 10 runs forward and 1 of 10 backward: does the loop make one step too many",
            {
                "num_microbatches + num_stages - 1)": "num_microbatches + num_stages)",
                "num_stages - 1 :]": "num_stages - 1 : -1]",
            },
        ),
        "one tick too few": Mistake(
            r"(ticks?|steps?|microbatch|expected)",
            {"jnp.arange(num_microbatches + num_stages - 1)": "jnp.arange(num_microbatches + num_stages - 2)"},
        ),
        "twice as many ticks": Mistake(
            r"(bubble|ticks|expected)",
            {
                "jnp.arange(num_microbatches + num_stages - 1)": "jnp.arange(2 * (num_microbatches + num_stages))",
                "outputs[num_stages - 1 :]": "outputs[num_stages - 1 : num_stages - 1 + num_microbatches]",
            },
            never="takes too long",
        ),
        "results kept from one tick too early": Mistake(
            r"On device 3, indices 1 to 5 of dim 0 have what belongs at indices 0 to 4",
            {"outputs[num_stages - 1 :]": "outputs[num_stages - 2 : -1]"},
        ),
        "carries what it computed": Mistake(
            r"“permute bytes” may have the same cause: less is sent than should be", {"return sent, y": "return y, y"}
        ),
        "first results kept": Mistake(
            r"On device 3, indices 3 to 5 of dim 0 have what belongs at indices 0 to 2",
            {"outputs[num_stages - 1 :]": "outputs[:num_microbatches]"},
        ),
        "garbage times zero": Mistake(
            r"are NaN.* idle tick.*Zero times NaN is NaN",
            {
                "    return outputs[num_stages - 1 :]": "    done = ticks >= num_stages - 1\n    outputs = outputs * done[:, None, None]\n    slots = jnp.maximum(ticks - num_stages + 1, 0)\n    return jnp.zeros_like(microbatches).at[slots].add(outputs)"
            },
        ),
    },
    "pipeline_loss": {
        "one key for all layers": Mistake(
            r"without dropout and wrong with it.*key",
            {"layer_key(key, microbatch, index)": "layer_key(key, microbatch, 0)"},
        ),
        "branches of a cond that vary differently": Mistake(
            r"branches of a lax\.cond.*one gives float32\[\]\{V:pipe\}, another float32\[\].*vary_alike",
            {
                "return lax.psum(jnp.where(last, loss, 0.0), axis_name)": "return lax.psum(lax.cond(last, lambda: loss, lambda: 0.0), axis_name)",
                "if rows % num_stages:": "if True:",
            },
            EDITED,
        ),
        "loss gathered on every stage": Mistake(
            r"gradients.*too large|4 times|times too large",
            {
                "return lax.psum(jnp.where(last, loss, 0.0), axis_name)": "return lax.all_gather(loss, axis_name)[-1]",
                "if rows % num_stages:": "if True:",
            },
        ),
    },
    "pipeline_train_step": {
        "a string for a tuple of axes": Mistake(
            r"no axis 'd'.*tuple of names.*\(axis_name,\) is a tuple of one",
            {"fold_key_over_axes(key, (data_axis,))": "fold_key_over_axes(key, data_axis)"},
            EDITED,
        ),
        "embedding's and head's shares not summed": Mistake(
            r"embed|head", {"lax.psum({**gradients, **ends}, data_axis)": "lax.psum(gradients, data_axis)"}
        ),
    },
}

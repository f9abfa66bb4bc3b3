"""Typical mistakes in ``data_parallel``, and the messages that they must get."""
# ruff: noqa: E501  edits and quoted lines keep the length that they have in a notebook

from autograder.proof.mistakes import EDITED, Mistake

MISTAKES = {
    "fold_key_over_axes": {
        "key never folded": Mistake(
            r"same key|equal|differ", {"key = jax.random.fold_in(key, lax.axis_index(name))": "key = key"}
        )
    },
    "sync_gradients": {
        "sum for mean": Mistake(
            r"times too large.*ax[ei]s.*sum or mean",
            {"lax.pmean(gradient, replicated_over)": "lax.psum(gradient, replicated_over)"},
        ),
        "sharded leaves averaged too": Mistake(
            r"the mean of what they should be|tensor", {"if name not in split_over": "if True"}
        ),
        "no reduction": Mistake(
            r"may have the same cause: less is sent than should be",
            {"return lax.pmean(gradient, replicated_over) if replicated_over else gradient": "return gradient"},
        ),
    },
    "train_step_dp": {
        "gradients not reduced": Mistake(
            r"may differ from device to device over data.*Which collective",
            {"loss, gradients = lax.psum(total, axis_name)": "loss, gradients = total"},
        ),
        "carry starts as an integer": Mistake(
            r"carry.*int32.*float32",
            {
                '(lax.pcast(jnp.zeros(()), axis_name, to="varying"), varying))': '(lax.pcast(jnp.zeros((), int), axis_name, to="varying"), varying))'
            },
            line="total, _ = lax.scan(accumulate, nothing, microbatches)",
        ),
        "carry starts the same everywhere": Mistake(
            r"carry.*varies over.*vary_alike\(first, x\)",
            {'(lax.pcast(jnp.zeros(()), axis_name, to="varying"), varying))': "(jnp.zeros(()), varying))"},
            line="total, _ = lax.scan(accumulate, nothing, microbatches)",
        ),
        "mean of the means": Mistake(
            r"begin with “values”.*begin with the loss\. Over which rows.*only 21 bytes are missing",
            {
                'share = jnp.sum(microbatch["mask"]) / count': "share = 1 / (num_microbatches * lax.axis_size(axis_name))"
            },
            never="does weight decay change|less is sent than should be",
        ),
        "parameters that are the same everywhere": Mistake(
            r"JAX inserted these all-reduces into the backward pass.*the same on all devices",
            {
                "microbatch))(varying)": "microbatch))(params)",
                'to="varying"), varying))': 'to="varying"), params))',
                "loss, gradients = lax.psum(total, axis_name)": "loss, gradients = lax.psum(total[0], axis_name), total[1]",
            },
            EDITED,
            never="course's line|where does each of yours run",
        ),
        "decay with the wrong sign": Mistake(
            r"loss of step 0 is right",
            {"p - learning_rate * (g + weight_decay": "p - learning_rate * (g - weight_decay"},
        ),
        "wrong key of the batch": Mistake(
            r"KeyError.*'masks'.*mask", {'batch["mask"]), axis_name)': 'batch["masks"]), axis_name)'}, EDITED
        ),
        "gradient of an array": Mistake(
            r"scalar.*(mean|sum)",
            {
                "lambda p: share * full_loss(model, p, microbatch)": "lambda p: share * full_loss(model, p, microbatch)[None]"
            },
            EDITED,
        ),
        "uneven reshape": Mistake(
            r"(reshape|cut|divided).*\d",
            {
                "rows.reshape(num_microbatches, -1, *rows.shape[1:])": "rows.reshape(num_microbatches, 5, *rows.shape[1:])"
            },
            EDITED,
        ),
    },
    "overlapped_gradients": {
        "means of devices added up": Mistake(
            r"1 is NaN\. The mask may be 0 everywhere on a device: what is divided by the unmasked count there\?",
            {'count = lax.psum(jnp.sum(batch["mask"]), axis_name)': 'count = jnp.sum(batch["mask"])'},
        )
    },
}

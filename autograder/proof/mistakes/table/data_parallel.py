"""Typical mistakes in ``data_parallel``, and the messages that they must get."""
# ruff: noqa: E501  edits and quoted lines are a notebook's, whole

from autograder.proof.mistakes import Mistake

MISTAKES = [
    Mistake(
        "fold_key_over_axes",
        "key never folded",
        r"same key|equal|differ",
        {"key = jax.random.fold_in(key, lax.axis_index(name))": "key = key"},
    ),
    Mistake(
        "sync_gradients",
        "sum for mean",
        r"times too large.*ax[ei]s.*sum or mean",
        {"lax.pmean(gradient, replicated_over)": "lax.psum(gradient, replicated_over)"},
        never="def sync",
    ),
    Mistake(
        "sync_gradients",
        "sharded leaves averaged too",
        r"the mean of what they should be|tensor",
        {"if name not in split_over": "if True"},
        never="def sync",
    ),
    Mistake(
        "sync_gradients",
        "no reduction",
        r"may have one cause: less is sent than should be",
        {"return lax.pmean(gradient, replicated_over) if replicated_over else gradient": "return gradient"},
    ),
    Mistake(
        "train_step_dp",
        "gradients not reduced",
        r"may differ from device to device over data.*Which collective",
        {"loss, gradients = lax.psum(total, axis_name)": "loss, gradients = total"},
    ),
    Mistake(
        "train_step_dp",
        "carry starts as an integer",
        r"carry.*int32.*float32",
        {
            '(lax.pcast(jnp.zeros(()), axis_name, to="varying"), varying))': '(lax.pcast(jnp.zeros((), int), axis_name, to="varying"), varying))'
        },
        line="total, _ = lax.scan(accumulate, nothing, microbatches)",
    ),
    Mistake(
        "train_step_dp",
        "carry starts the same everywhere",
        r"carry.*varies over.*vary_alike\(first, x\)",
        {'(lax.pcast(jnp.zeros(()), axis_name, to="varying"), varying))': "(jnp.zeros(()), varying))"},
        line="total, _ = lax.scan(accumulate, nothing, microbatches)",
    ),
    Mistake(
        "train_step_dp",
        "mean of the means",
        r"begin with “values”.*begin with it\. Of which rows.*only 21 bytes are missing",
        {'share = jnp.sum(microbatch["mask"]) / count': "share = 1 / (num_microbatches * lax.axis_size(axis_name))"},
        never="does decay pull|less is sent than should be",
    ),
    Mistake(
        "train_step_dp",
        "parameters that are the same everywhere",
        r"JAX put these all-reduces into the backward pass.*the same on all devices",
        {
            "microbatch))(varying)": "microbatch))(params)",
            'to="varying"), varying))': 'to="varying"), params))',
            "loss, gradients = lax.psum(total, axis_name)": "loss, gradients = lax.psum(total[0], axis_name), total[1]",
        },
        line="found = jax.value_and_grad(lambda p: share * full_loss(model, p, microbatch))(params)",
        never="course's line|where does each of yours run",
    ),
    Mistake(
        "train_step_dp",
        "decay with the wrong sign",
        r"loss of step 0 is right",
        {"p - learning_rate * (g + weight_decay": "p - learning_rate * (g - weight_decay"},
    ),
    Mistake(
        "train_step_dp",
        "wrong key of the batch",
        r"KeyError.*'masks'.*mask",
        {'batch["mask"]), axis_name)': 'batch["masks"]), axis_name)'},
        line='count = lax.psum(jnp.sum(batch["masks"]), axis_name)',
    ),
    Mistake(
        "train_step_dp",
        "gradient of an array",
        r"scalar.*(mean|sum)",
        {
            "lambda p: share * full_loss(model, p, microbatch)": "lambda p: share * full_loss(model, p, microbatch)[None]"
        },
        line="found = jax.value_and_grad(lambda p: share * full_loss(model, p, microbatch)[None])(varying)",
    ),
    Mistake(
        "train_step_dp",
        "uneven reshape",
        r"(reshape|cut|divided).*\d",
        {"rows.reshape(num_microbatches, -1, *rows.shape[1:])": "rows.reshape(num_microbatches, 5, *rows.shape[1:])"},
        line="microbatches = jax.tree.map(lambda rows: rows.reshape(num_microbatches, 5, *rows.shape[1:]), batch)",
    ),
    Mistake(
        "overlapped_gradients",
        "means of devices added up",
        r"8 elements\. The mask may be 0 everywhere on a device: what is divided by what counts there\?",
        {'count = lax.psum(jnp.sum(batch["mask"]), axis_name)': 'count = jnp.sum(batch["mask"])'},
    ),
]

"""Typical mistakes in ``tensor_parallel``, and the messages that they must get."""
# ruff: noqa: E501  edits and quoted lines are a notebook's, whole

from autograder.proof.mistakes import Mistake

MISTAKES = [
    Mistake(
        "row_parallel_dense",
        "tiled left out",
        r"without tiled=True, lax\.psum_scatter takes its scatter_dimension away.*With tiled=True each device keeps",
        {"scatter_dimension=x.ndim - 2, tiled=True": "scatter_dimension=x.ndim - 2"},
        line='y = lax.psum_scatter(x @ params["kernel"], axis_name, scatter_dimension=x.ndim - 2)',
    ),
    Mistake(
        "row_parallel_dense",
        "negative scatter_dimension",
        r"scatter_dimension.*(x\.ndim|from 0|negative)",
        {"scatter_dimension=x.ndim - 2": "scatter_dimension=-2"},
        line='y = lax.psum_scatter(x @ params["kernel"], axis_name, scatter_dimension=-2, tiled=True)',
    ),
    Mistake(
        "row_parallel_dense",
        "bias added on every device before the sum",
        r"times|bias",
        {
            'x @ params["kernel"], axis_name': 'x @ params["kernel"] + params.get("bias", 0), axis_name',
            'y + params["bias"] if "bias" in params else y': "y",
        },
        never="def row_parallel_dense",
    ),
    Mistake(
        "column_parallel_dense",
        "rows not gathered",
        r"\[.*\].*expected",
        {"lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True) @": "x @"},
    ),
    Mistake(
        "column_parallel_dense",
        "kernel transposed",
        r"shapes?.*\d",
        {'@ params["kernel"]': '@ params["kernel"].T'},
        line='y = lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True) @ params["kernel"].T',
    ),
    Mistake(
        "init_dense",
        "same key on every device",
        r"same|key|differ",
        {"fold_key_over_axes(key, (axis_name,)) if split else key": "key"},
    ),
    Mistake(
        "tp_mlp",
        "another order of the arguments",
        r".",
        {'column_parallel_dense(params["up"], x, axis_name)': 'column_parallel_dense(x, params["up"], axis_name)'},
        line='hidden = jax.nn.gelu(column_parallel_dense(x, params["up"], axis_name))',
    ),
    Mistake(
        "tp_train_step",
        "sum for mean over data",
        r"whose losses does a device's gradient of it belong to",
        {
            "return lax.pmean(gradient, (data_axis, tensor_axis))": "return lax.psum(gradient, data_axis) / lax.axis_size(tensor_axis)"
        },
        never="def tp_train_step",
    ),
    Mistake(
        "tp_attention",
        "q, k and v gathered one by one",
        r"sends 2,160 bytes in each of its 3 runs, and 4,320 bytes in all are enough.*do the products need other rows",
        {
            'column_parallel_dense({"kernel": kernel.reshape(width, -1)}, x, axis_name)': (
                'jnp.concatenate([column_parallel_dense({"kernel": k.reshape(width, -1)}, x, axis_name) '
                "for k in jnp.moveaxis(kernel, 1, 0)], -1)"
            )
        },
        never="1 of its 3 runs",
    ),
]

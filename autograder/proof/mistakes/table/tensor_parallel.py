"""Typical mistakes in ``tensor_parallel``, and the messages that they must get."""
# ruff: noqa: E501  edits and quoted lines keep the length that they have in a notebook

from autograder.proof.mistakes import EDITED, Mistake

MISTAKES = {
    "row_parallel_dense": {
        "tiled left out": Mistake(
            r"without tiled=True, lax\.psum_scatter removes its scatter_dimension.*With tiled=True each device keeps",
            {"scatter_dimension=x.ndim - 2, tiled=True": "scatter_dimension=x.ndim - 2"},
            EDITED,
        ),
        "negative scatter_dimension": Mistake(
            r"scatter_dimension.*(x\.ndim|from 0|negative)",
            {"scatter_dimension=x.ndim - 2": "scatter_dimension=-2"},
            EDITED,
        ),
        "bias added on every device before the sum": Mistake(
            r"Every row is off by \d times `\S*bias`: is it added on each device before a sum",
            {
                'x @ params["kernel"], axis_name': 'x @ params["kernel"] + params.get("bias", 0), axis_name',
                'y + params["bias"] if "bias" in params else y': "y",
            },
        ),
    },
    "column_parallel_dense": {
        "rows not gathered": Mistake(
            r"\[.*\].*expected", {"lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True) @": "x @"}
        ),
        "kernel transposed": Mistake(r"shapes?.*\d", {'@ params["kernel"]': '@ params["kernel"].T'}, EDITED),
    },
    "init_dense": {
        "same key on every device": Mistake(
            r"same|key|differ", {"fold_key_over_axes(key, (axis_name,)) if split else key": "key"}
        ),
        "one branch is not written yet": Mistake(
            r"init_dense is not complete: it raises NotImplementedError",
            {
                "    shape = d_in // (n": '    if split == "rows":\n        raise NotImplementedError\n    shape = d_in // (n'
            },
            line="raise NotImplementedError",
            never="not started",
        ),
    },
    "tp_mlp": {
        "another order of the arguments": Mistake(
            r".",
            {'column_parallel_dense(params["up"], x, axis_name)': 'column_parallel_dense(x, params["up"], axis_name)'},
            EDITED,
        )
    },
    "tp_train_step": {
        "sum for mean over data": Mistake(
            r"which devices' losses contribute to a device's gradient of it",
            {
                "return lax.pmean(gradient, (data_axis, tensor_axis))": "return lax.psum(gradient, data_axis) / lax.axis_size(tensor_axis)"
            },
        )
    },
    "tp_attention": {
        "q, k and v gathered one by one": Mistake(
            r"sends 2,160 bytes in each of its 3 runs, and 4,320 bytes in all are enough.*do the products need other rows",
            {
                'column_parallel_dense({"kernel": kernel.reshape(width, -1)}, x, axis_name)': (
                    'jnp.concatenate([column_parallel_dense({"kernel": k.reshape(width, -1)}, x, axis_name) '
                    "for k in jnp.moveaxis(kernel, 1, 0)], -1)"
                )
            },
            never="1 of its 3 runs",
        )
    },
}

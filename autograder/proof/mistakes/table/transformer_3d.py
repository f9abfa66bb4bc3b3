"""Typical mistakes in ``transformer_3d``, and the messages that they must get."""
# ruff: noqa: E501  edits and quoted lines keep the length that they have in a notebook

from autograder.proof.mistakes import Mistake

MISTAKES = {
    "whole_weights": {
        "a backward rule that returns no tuple": Mistake(
            r"must return a tuple with one entry for each argument",
            {"(jax.tree.map(complete, g, specs),))": "jax.tree.map(complete, g, specs))"},
            never="PyTreeDef",
        ),
        "gradient not divided by the places on data": Mistake(
            r"2 times too large, and axis 'data' has that size",
            {" / lax.axis_size(data_axis)": ""},
            never="microbatches|'pipe' or",
        ),
        "weights sent in float32": Mistake(
            r"Which dtype should travel\?.*float32 numbers should have been rounded to bfloat16.*in bfloat16 all would be",
            {"sent = part.astype(dtype)": "sent = part"},
            never="lower precision|loop run too often",
        ),
        "gradients not summed": Mistake(
            r"is something never sent, or sent by another collective",
            {"total = lax.psum(gradient, axes) /": "total = gradient /"},
            never="summed more than once",
        ),
    },
    "stage_3d": {
        "layers' numbers without the stage": Mistake(
            r"Only devices at pipe 1 are wrong",
            {"layer_key(key, microbatch, first + j)": "layer_key(key, microbatch, j)"},
            never="Along dim 0",
        ),
        "the residual stream rounded": Mistake(
            r"If it is right in float32, what else is rounded, such as what one block passes on to the next\?",
            {"block(one, x, layer": "block(one, x.astype(options.dtype).astype(x.dtype), layer"},
        ),
        "a layer left out": Mistake(
            r"Along dim 0 \(of size 2\), only index 1 is zero throughout and should not be\. Is what belongs there used",
            {"range(len(jax.tree.leaves(weights)[0]))": "range(len(jax.tree.leaves(weights)[0]) - 1)"},
            never="mask",
        ),
    },
    "train_step_3d": {
        "gradients not clipped": Mistake(
            r"begin with “gradients”.*leaf loss on mesh .* in step 1 .*The loss of step 0 is right",
            {"jnp.minimum(1, largest_norm / norm)": "1"},
        )
    },
    "forward_3d": {
        "outputs of stage 0": Mistake(
            r"not measured.*On which stage are the outputs of the last layer.*cases in bfloat16 are run once those before them pass",
            {"last, targets = index == num_stages - 1,": "last, targets = index == 0,"},
            never="no case",
        )
    },
    "choose_mesh": {
        "an answer where nothing fits": Mistake(
            r"Choice\(.*'block', 3\).*Nothing fits here: raise ValueError",
            {
                'raise ValueError(f"a model of {sizes.count:,} parameters does not fit on {num_devices} devices in any way")': (
                    'return Choice(num_devices, 1, 1, 1, 1, "block", 3)'
                )
            },
        )
    },
    "init_3d": {
        "stages along the wrong dim": Mistake(
            r"measured float32\[4, 1, 2, 8, 2, 16\], expected float32\[2, 2, 2, 8, 2, 16\].*exactly those under `layers`",
            {"P(None, pipe_axis, None, *spec[1:])": "P(pipe_axis, None, None, *spec[1:])"},
        ),
        "split over data alone": Mistake(
            r"the part differs from device to device over tensor, and its spec P\('data'\) says that it is whole\. Does the spec say which",
            {"(tensor_axis, data_axis) if dims[dim] else data_axis": "data_axis"},
        ),
    },
}

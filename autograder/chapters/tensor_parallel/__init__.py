"""The contract of ``tensor_parallel``: every device holds some features."""

from autograder.chapters.tensor_parallel.init import INIT_DENSE
from autograder.chapters.tensor_parallel.tasks import (
    COLUMN_PARALLEL_DENSE,
    ROW_PARALLEL_DENSE,
    TP_ATTENTION,
    TP_MLP,
    TP_TRAIN_STEP,
)
from autograder.contract.task import Contract

EXPLAINED_IN = {
    "values": ("tensor_parallel", "Mistakes that cost people days"),
    "initial scale": ("tensor_parallel", "Initial weights"),
    "communication": ("tensor_parallel", "Initial weights"),
    "largest temporary": ("tensor_parallel", "Initial weights"),
    "numbers drawn": ("tensor_parallel", "Initial weights"),
    "gradients": ("tensor_parallel", "The scale of a gradient"),
    "gradient norm": ("tensor_parallel", "Find the mis-scaled gradient"),
    "all-gather bytes": ("tensor_parallel", "What is sent"),
    "reduce-scatter bytes": ("tensor_parallel", "What is sent"),
    "other collectives": ("tensor_parallel", "What is sent"),
    "collectives forward": ("tensor_parallel", "Two layers, one pair of collectives"),
    "predicted time": ("tensor_parallel", "What it costs"),
    "all-reduce bytes": ("tensor_parallel", "The scale of a gradient"),
    "init_dense.values": ("tensor_parallel", "Initial weights"),
    "column_parallel_dense.values": ("tensor_parallel", "What is sent"),
    "row_parallel_dense.values": ("tensor_parallel", "What is sent"),
    "tp_mlp.values": ("tensor_parallel", "Two layers, one pair of collectives"),
    "tp_mlp.gradients": ("tensor_parallel", "Two layers, one pair of collectives"),
    "tp_attention.values": ("tensor_parallel", "Two layers, one pair of collectives"),
    "tp_attention.gradients": ("tensor_parallel", "Two layers, one pair of collectives"),
    "tp_train_step.values": ("tensor_parallel", "The scale of a gradient"),
}

_GATHERED, _SCATTERED, _OTHERS = "all-gather bytes", "reduce-scatter bytes", "other collectives"
_FORWARD = "collectives forward"
_BLOCK = {
    "| all-gather | exactly one": (_GATHERED, _FORWARD),
    "| reduce-scatter | exactly one": (_SCATTERED, _FORWARD),
    "| any other collective | none": (_OTHERS, _FORWARD),
}
PROMISES: dict[str, dict[str, tuple[str, ...]]] = {
    "init_dense": {
        "Each device draws its own part": ("numbers drawn",),
        "no device ever holds the whole layer, not even while drawing": ("largest temporary",),
        "| operations": ("numbers drawn",),
        "Kernel entries have mean 0 and standard deviation `d_in ** -0.5`, with the `d_in` of the whole layer.": (
            "initial scale",
        ),
        "Biases are zero.": ("values",),
        "Parts of one kernel are drawn independently.": ("values",),
        "Arrays that are not split are the same on every device of the axis.": ("values",),
        "Devices along *other* axes of the mesh hold equal copies.": ("values",),
        "must give numbers that no device draws with this one": ("values",),
        "standard deviation of a whole kernel": ("initial scale",),
        "| largest temporary": ("largest temporary",),
        "| communication | none |": ("communication",),
        "[d_in, d_out]`` and ``[d_out]`` for None.": ("values",),
    },
    "column_parallel_dense": {
        "Write it so that the rows are sent.": (_GATHERED,),
        "The bias is split like the outputs. `params` may have no bias: then nothing is added.": ("values",),
        "`x` may have any number of leading dims": ("values", "gradients"),
        "Rows are always dim -2, and their order does not change.": ("values",),
        "varying over `axis_name`": (),
        "| result |": ("values",),
        "| gradient of `x` |": ("gradients",),
        "| all-gather of rows |": (_GATHERED,),
        "| reduce-scatter |": (_SCATTERED,),
        "| any other collective |": (_OTHERS,),
        "All rows of this device's outputs": ("values",),
    },
    "row_parallel_dense": {
        "Add up the parts over the devices.": ("values",),
        "The bias is the same on every device, and must be added to each row once.": ("values",),
        "your gradient of it is this device's own share": ("gradients",),
        "| `x` |": (),
        "| result |": ("values",),
        "| reduce-scatter of rows |": (_SCATTERED,),
        "| all-gather |": (_GATHERED,),
        "| any other collective |": (_OTHERS,),
        "This device's rows of all outputs": ("values",),
    },
    "tp_mlp": {
        "Put the two layers together": ("values", "gradients"),
        **_BLOCK,
        "predicted time": ("predicted time",),
        "This device's rows, like ``x``.": ("values",),
    },
    "tp_attention": {
        "Attention mixes positions": (),
        "So give each device some heads": (),
        "`num_heads * head_dim` need not be the width": ("values",),
        "Attention is causal": ("values", "gradients"),
        **_BLOCK,
        "This device's part of each sequence, like ``x``.": ("values",),
    },
    "tp_train_step": {
        "`check` compares every leaf with the gradient of the mean over all rows": ("gradients", "gradient norm"),
        "work out on paper": (),
        "Update by plain SGD": ("values",),
        "Copies must stay equal.": ("values", "gradients"),
        "| all-gather |": (_GATHERED,),
        "| reduce-scatter |": (_SCATTERED,),
        "| all-reduce |": ("all-reduce bytes",),
        "| any other collective |": (_OTHERS,),
        "the updated parameters, and the mean loss over all rows, the same on every device.": ("values",),
    },
}

CONTRACT = Contract(
    "tensor_parallel",
    (INIT_DENSE, COLUMN_PARALLEL_DENSE, ROW_PARALLEL_DENSE, TP_MLP, TP_ATTENTION, TP_TRAIN_STEP),
    question_points=2,
    explained_in=EXPLAINED_IN,
)

"""The contract of ``data_parallel``: one model, many batches."""

from autograder.chapters.data_parallel.tasks import (
    FOLD_KEY_OVER_AXES,
    OVERLAPPED_GRADIENTS,
    SYNC_GRADIENTS,
    TRAIN_STEP_DP,
)
from autograder.contract.task import Contract

EXPLAINED_IN = {
    "values": ("data_parallel", "Mistakes that cost people days"),
    "communication": ("data_parallel", "Randomness"),
    "gradients": ("data_parallel", "Sums, means and what varies"),
    "gradient norm": ("data_parallel", "Sums, means and what varies"),
    "all-reduces": ("data_parallel", "Which axes to average a leaf over"),
    "all-reduce bytes": ("data_parallel", "Accumulate first, reduce once"),
    "other collectives": ("data_parallel", "What an all-reduce costs"),
    "live temporaries": ("data_parallel", "Accumulate first, reduce once"),
    "exposed communication": ("data_parallel", "Reduce while the backward pass goes on"),
    "predicted time": ("data_parallel", "Reduce while the backward pass goes on"),
    "compiled exposed": ("profiling/data_parallel", "What the compiler does with it"),
    "fold_key_over_axes.values": ("data_parallel", "Randomness"),
    "sync_gradients.values": ("data_parallel", "Which axes to average a leaf over"),
    "sync_gradients.all-reduce bytes": ("data_parallel", "Which axes to average a leaf over"),
    "train_step_dp.values": ("data_parallel", "Weight decay"),
    "train_step_dp.gradients": ("data_parallel", "Tokens that do not count"),
    "train_step_dp.gradient norm": ("data_parallel", "Tokens that do not count"),
    "overlapped_gradients.values": ("data_parallel", "Tokens that do not count"),
}

VALUES = ("values", "gradients", "gradient norm")
# Pieces of the notebook's text, and the facts that enforce them.
PROMISES = {
    "fold_key_over_axes": {
        "Two devices that differ along a named axis get different keys": ("values",),
        "If no axis is named, all keys are equal.": ("values",),
        "no device keeps the original key": ("values",),
        "Runs that start from different keys share none": ("values",),
        "| key, inside `shard_map` |": ("values",),
        "| communication |": ("communication",),
        "One key on each device.": ("values",),
    },
    "sync_gradients": {
        "| all-reduce |": ("all-reduces",),
        "| bytes sent per device |": ("all-reduce bytes",),
        "| any other collective |": ("other collectives",),
        "the mean over the axes in ``axis_names`` that the leaf's spec does not name": ("values",),
    },
    "train_step_dp": {
        "Do not branch on the data (`lax.cond`) to skip one without any": (),  # a Program with such a branch is refused
        "The gradient of a replicated parameter must come out replicated": (),
        "If the reduction is inside the scan, it runs once per microbatch": ("all-reduces", "all-reduce bytes"),
        "padding must not count": VALUES,
        "The loss is the mean over all unmasked rows or tokens, on all devices": VALUES,
        "Write the whole step.": (),
        "Split this device's rows": ("live temporaries",),
        "Sum loss and gradient over the parts": VALUES,
        "Reduce over the devices, once.": ("all-reduces", "all-reduce bytes"),
        "Update by SGD with weight decay.": ("values",),
        "Return the new parameters, the loss and the gradients": VALUES,
        "The gradients are those of the loss alone, without decay.": ("gradients",),
        "each of them is still a bias": ("values",),
        "| all-reduce |": ("all-reduces",),
        "| bytes sent per device |": ("all-reduce bytes",),
        "| any other collective |": ("other collectives",),
        "| live temporaries |": ("live temporaries",),
        "after each of three steps on three batches": VALUES,
        "A scan's carry must have the same type before and after its body:": (),
        "zeros do not vary until you cast them": (),
        "``(params, loss, gradients)``: updated parameters": VALUES,
    },
    "overlapped_gradients": {
        "Accumulate as before, but do not wait for the end": ("exposed communication",),
        "| exposed communication on 8 A5000s |": ("exposed communication",),
        "| predicted time |": ("predicted time",),
        "Hiding transfers behind extra work does not count": ("predicted time",),
        "delays no transfer, but reads and writes": (),
        "| bytes sent per device |": ("all-reduce bytes",),
        "| any other collective |": ("other collectives",),
        "Each device returns its share of it": ("values",),
        "The gradients are those of the loss, the same on every device.": ("gradients", "gradient norm"),
        "``(loss, gradients)``: this device's share": VALUES,
    },
}

CONTRACT = Contract(
    "data_parallel",
    (FOLD_KEY_OVER_AXES, SYNC_GRADIENTS, TRAIN_STEP_DP, OVERLAPPED_GRADIENTS),
    question_points=2,
    explained_in=EXPLAINED_IN,
)

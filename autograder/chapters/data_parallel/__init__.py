"""The contract of ``data_parallel``: one model, many batches."""

from autograder.chapters.data_parallel.tasks import (
    FOLD_KEY_OVER_AXES,
    OVERLAPPED_GRADIENTS,
    SYNC_GRADIENTS,
    TRAIN_STEP_DP,
)
from autograder.contract.task import Contract

READ = {
    "values": ("data_parallel", "Mistakes that cost people days"),
    "communication": ("data_parallel", "Randomness"),
    "gradients": ("data_parallel", "Sums, means and what varies"),
    "gradient norm": ("data_parallel", "Sums, means and what varies"),
    "all-reduces": ("data_parallel", "Which axes a leaf needs"),
    "all-reduce bytes": ("data_parallel", "Accumulate first, reduce once"),
    "other collectives": ("data_parallel", "What an all-reduce costs"),
    "live temporaries": ("data_parallel", "Accumulate first, reduce once"),
    "exposed communication": ("data_parallel", "Reduce while the backward pass goes on"),
    "compiled exposed": ("profiling/data_parallel", "What the compiler makes of it"),
}

CONTRACT = Contract(
    "data_parallel",
    (FOLD_KEY_OVER_AXES, SYNC_GRADIENTS, TRAIN_STEP_DP, OVERLAPPED_GRADIENTS),
    question_points=2,
    read=READ,
)

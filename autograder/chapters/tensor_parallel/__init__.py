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

READ = {
    "values": ("tensor_parallel", "Mistakes that cost people days"),
    "initial scale": ("tensor_parallel", "The first numbers"),
    "communication": ("tensor_parallel", "The first numbers"),
    "gradients": ("tensor_parallel", "The scale of a gradient"),
    "gradient norm": ("tensor_parallel", "Find the mis-scaled gradient"),
    "all-gather bytes": ("tensor_parallel", "What travels"),
    "reduce-scatter bytes": ("tensor_parallel", "What travels"),
    "other collectives": ("tensor_parallel", "What travels"),
    "collectives forward": ("tensor_parallel", "Two layers, one pair of collectives"),
    "predicted time": ("tensor_parallel", "What it costs"),
    "all-reduce bytes": ("tensor_parallel", "The scale of a gradient"),
}

CONTRACT = Contract(
    "tensor_parallel",
    (INIT_DENSE, COLUMN_PARALLEL_DENSE, ROW_PARALLEL_DENSE, TP_MLP, TP_ATTENTION, TP_TRAIN_STEP),
    question_points=2,
    read=READ,
)

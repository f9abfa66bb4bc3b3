"""The contract of ``async_tensor_parallel``: communicate while computing."""

from autograder.chapters.async_tensor_parallel.tasks import ASYNC_TP_MLP, RINGS
from autograder.contract.task import Contract

READ = {
    "values": ("async_tensor_parallel", "A product in a ring"),
    "gradients": ("async_tensor_parallel", "The backward pass"),
    "gradient norm": ("async_tensor_parallel", "The backward pass"),
    "permute bytes": ("async_tensor_parallel", "What it costs"),
    "other collectives": ("async_tensor_parallel", "A product in a ring"),
    "predicted time": ("async_tensor_parallel", "What it costs"),
    "live temporaries": ("async_tensor_parallel", "What it costs"),
    "bytes each way": ("async_tensor_parallel", "Both ways round"),
    "exposed communication": ("async_tensor_parallel", "The backward pass"),
    "compiled exposed": ("profiling/async_tensor_parallel", "The third witness"),
}

CONTRACT = Contract("async_tensor_parallel", (*RINGS, ASYNC_TP_MLP), question_points=2, read=READ)

"""The contract of ``async_tensor_parallel``: communicate while computing."""

from autograder.chapters.async_tensor_parallel import mlp, rings
from autograder.contract.task import Contract, Task
from autograder.contract.wrapping import wrappings

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

CONTRACT = Contract(
    "async_tensor_parallel",
    (
        *rings.TASKS,
        Task(
            wrapping=wrappings("async_tensor_parallel")["async_tp_mlp"],
            kind="local",
            points=4,
            cases=mlp.CASES,
            unseen=mlp.unseen,
            draw=mlp.draw,
            oracle=mlp.oracle,
            facts=mlp.mlp_facts,
            analysed=mlp.ANALYSED,
            naive="synchronous",
            slow="synchronous",
            compiled_exposed=mlp.EXPOSED,
        ),
    ),
    question_points=2,
    read=READ,
)

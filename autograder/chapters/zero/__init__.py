"""The contract of ``zero``: every device updates its part of the model."""

from autograder.chapters.zero.tasks import GLOBAL_NORM, SHARD_OPTIMIZER_STATE, SHARDED_ADAMW, ZERO1_STEP, ZERO2_STEP
from autograder.contract.task import Contract

READ = {
    name: ("zero", "Mistakes that cost people days")
    for name in (
        "values",
        "gradients",
        "gradient norm",
        "split dims",
        "state bytes per device",
        "communication",
        "all-reduces",
        "all-gather bytes",
        "reduce-scatter bytes",
        "all-reduce bytes",
        "other collectives",
        "live temporaries",
    )
}
PROMISES = {}

CONTRACT = Contract(
    "zero", (SHARD_OPTIMIZER_STATE, GLOBAL_NORM, SHARDED_ADAMW, ZERO1_STEP, ZERO2_STEP), question_points=2, read=READ
)

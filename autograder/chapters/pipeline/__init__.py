"""The contract of ``pipeline``: every device holds some layers."""

from autograder.chapters.pipeline.model import PIPELINE_LOSS, PIPELINE_TRAIN_STEP
from autograder.chapters.pipeline.schedule import EXECUTE_PIPELINE, PIPELINE_TICK, SPLIT_MICROBATCHES
from autograder.contract.task import Contract

READ = {
    "values": ("pipeline", "Mistakes that cost people days"),
    "gradients": ("pipeline", "Whose gradient, and how large"),
    "gradient norm": ("pipeline", "Whose gradient, and how large"),
    "uneven batch": ("pipeline", "Microbatches"),
    "uneven layers": ("pipeline", "Who holds what"),
    "communication": ("pipeline", "Microbatches"),
    "bubble": ("pipeline", "The bubble"),
    "permute bytes": ("pipeline", "What is sent"),
    "loss bytes": ("pipeline", "The loss, once or in parts"),
    "FLOPs": ("pipeline", "The loss, once or in parts"),
    "all-reduce bytes": ("pipeline", "Whose gradient, and how large"),
    "live temporaries": ("pipeline", "What the backward pass keeps"),
    "other collectives": ("pipeline", "What is sent"),
}

CONTRACT = Contract(
    "pipeline",
    (SPLIT_MICROBATCHES, PIPELINE_TICK, EXECUTE_PIPELINE, PIPELINE_LOSS, PIPELINE_TRAIN_STEP),
    question_points=2,
    read=READ,
)

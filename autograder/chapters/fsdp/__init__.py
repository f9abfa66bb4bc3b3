"""The contract of ``fsdp``: every device holds a part of the model."""

from autograder.chapters.fsdp.tasks import FSDP_LOSS, FSDP_TRAIN_STEP, GATHER_PARAMS, HYBRID_SHARD_STEP, SHARD_PARAMS
from autograder.contract.task import Contract

READ = {
    "values": ("fsdp", "Mistakes that cost people days"),
    "gradients": ("fsdp", "The scale of a gradient"),
    "gradient norm": ("fsdp", "The scale of a gradient"),
    "split dims": ("fsdp", "Which leaves, and along which dim"),
    "state bytes per device": ("fsdp", "Which leaves, and along which dim"),
    "communication": ("fsdp", "Which leaves, and along which dim"),
    "live temporaries": ("fsdp", "Why the backward pass gathers again"),
    "predicted time": ("fsdp", "The next layer on its way"),
    "exposed communication": ("lenses", "How to read a timeline"),
    "all-gather bytes": ("fsdp", "Where the 1.5 comes from"),
    "reduce-scatter bytes": ("fsdp", "Where the 1.5 comes from"),
    "all-reduce bytes": ("fsdp", "The scale of a gradient"),
    "bytes between nodes": ("fsdp", "Hybrid sharding: inside a node"),
    "other collectives": ("fsdp", "Where the 1.5 comes from"),
}

CONTRACT = Contract(
    "fsdp",
    (SHARD_PARAMS, GATHER_PARAMS, FSDP_LOSS, FSDP_TRAIN_STEP, HYBRID_SHARD_STEP),
    question_points=2,
    read=READ,
)

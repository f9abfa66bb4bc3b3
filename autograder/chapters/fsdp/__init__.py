"""The contract of ``fsdp``: every device holds a part of the model."""

from autograder.chapters.fsdp.tasks import FSDP_LOSS, FSDP_TRAIN_STEP, GATHER_PARAMS, HYBRID_SHARD_STEP, SHARD_PARAMS
from autograder.contract.task import Contract

EXPLAINED_IN = {
    "values": ("fsdp", "Mistakes that cost people days"),
    "gradients": ("fsdp", "The scale of a gradient"),
    "gradient norm": ("fsdp", "The scale of a gradient"),
    "split dims": ("fsdp", "Which leaves, and along which dim"),
    "state bytes per device": ("fsdp", "Which leaves, and along which dim"),
    "communication": ("fsdp", "Which leaves, and along which dim"),
    "live temporaries": ("fsdp", "Why the backward pass gathers again"),
    "predicted time": ("fsdp", "Gathering the next layer ahead"),
    "exposed communication": ("lenses", "How to read a timeline"),
    "all-gather bytes": ("fsdp", "Where the 1.5 comes from"),
    "reduce-scatter bytes": ("fsdp", "Where the 1.5 comes from"),
    "all-reduce bytes": ("fsdp", "The scale of a gradient"),
    "bytes between nodes": ("fsdp", "Hybrid sharding: inside a node"),
    "other collectives": ("fsdp", "Where the 1.5 comes from"),
    "shard_params.values": ("fsdp", "Which leaves, and along which dim"),
    "gather_params.values": ("fsdp", "Which leaves, and along which dim"),
    "fsdp_loss.values": ("fsdp", "One layer at a time"),
    "fsdp_train_step.values": ("fsdp", "The scale of a gradient"),
    "hybrid_shard_step.values": ("fsdp", "Hybrid sharding: inside a node"),
    "hybrid_shard_step.gradients": ("fsdp", "Hybrid sharding: inside a node"),
    "hybrid_shard_step.gradient norm": ("fsdp", "Hybrid sharding: inside a node"),
}

VALUES = ("values", "gradients", "gradient norm")
BOTH_WAYS = ("all-gather bytes", "reduce-scatter bytes")
# Pieces of the notebook's text, and the facts that enforce them.
PROMISES = {
    "shard_params": {
        "A leaf with fewer than `min_size` elements stays whole": ("split dims", "state bytes per device"),
        "Otherwise split the largest dim that is divisible": ("split dims", "values"),
        "A leaf with no divisible dim stays whole": ("split dims",),
        "| bytes held per device |": ("state bytes per device",),
        "| communication |": ("communication",),
        "the local part of each leaf": ("values", "split dims"),
    },
    "gather_params": {
        "| per sharded leaf |": BOTH_WAYS,
        "| bytes sent per device |": BOTH_WAYS,
        "| all-reduce |": ("other collectives",),
        "Do not change the gradient of a leaf that stayed whole": ("gradients", "other collectives"),
        "Values and gradients must equal those of a single device": ("values", "gradients"),
        "A tree like ``shards`` with whole leaves.": ("values", "gradients"),
    },
    "fsdp_loss": {
        "Gathering the whole model at once": ("live temporaries",),
        "So gather one layer": ("live temporaries",),
        "Make the backward pass gather each layer again": ("live temporaries",),
        "it is never split": (),
        "Use `gather_params`": ("gradients",),
        "| live temporaries |": ("live temporaries",),
        "| predicted step time on 8 H100s |": ("predicted time",),
        "| all-gather |": ("all-gather bytes",),
        "| reduce-scatter |": ("reduce-scatter bytes",),
        "| any other collective |": ("other collectives",),
        "The mean loss over this device's rows": VALUES,
    },
    "fsdp_train_step": {
        "Operations can only run concurrently": (),
        "So each iteration must have the whole weights that it computes with in its carry from the start": (
            "predicted time",
        ),
        "You must write the backward pass yourself": ("live temporaries", "predicted time"),
        "Write the backward pass as your own scan": ("live temporaries", "predicted time"),
        "until you average them, once per leaf and step": ("gradients", "all-reduce bytes"),
        "the mean over all unmasked rows or tokens on all devices, the same on every device": VALUES,
        "Divide after the reduce-scatter, not before": ("predicted time",),
        "| predicted step time on 8 H100s |": ("predicted time",),
        "| live temporaries |": ("live temporaries",),
        "| all-gather |": ("all-gather bytes",),
        "| reduce-scatter |": ("reduce-scatter bytes",),
        "| all-reduce |": ("all-reduce bytes",),
        "| any other collective |": ("other collectives",),
        "Parameters after one step and after three must equal those of a single device": VALUES,
        "``(shards, loss)``: the updated parts": VALUES,
    },
    "hybrid_shard_step": {
        "sends every weight over them twice": (),
        "The nodes must still agree.": ("values",),
        "Write the step.": (),
        "Gather whole arrays within the node": ("all-gather bytes", "bytes between nodes"),
        "leaves that stay whole are the same on all devices": ("values",),
        "Use `fsdp_loss`": (),
        "The gradient is the mean over all rows of all nodes, for every leaf; so is the loss.": VALUES,
        "| all-gather within a node": ("all-gather bytes",),
        "| reduce-scatter within a node": ("reduce-scatter bytes",),
        "| all-reduce within a node": ("all-reduce bytes",),
        "| any other collective within a node": ("other collectives",),
        "| between nodes, over `replica_axis` |": ("bytes between nodes",),
        "a device sends `2 (r-1)/r (S/n + W)` bytes between nodes": ("bytes between nodes",),
        "``(shards, loss)``: the updated parts, the same on every node": VALUES,
    },
}

CONTRACT = Contract(
    "fsdp",
    (SHARD_PARAMS, GATHER_PARAMS, FSDP_LOSS, FSDP_TRAIN_STEP, HYBRID_SHARD_STEP),
    question_points=2,
    explained_in=EXPLAINED_IN,
)

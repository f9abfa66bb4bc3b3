"""The contract of ``pipeline``: every device holds some layers."""

from autograder.chapters.pipeline.model import PIPELINE_LOSS, PIPELINE_TRAIN_STEP
from autograder.chapters.pipeline.schedule import EXECUTE_PIPELINE, PIPELINE_TICK, SPLIT_MICROBATCHES
from autograder.contract.task import Contract

EXPLAINED_IN = {
    "values": ("pipeline", "Mistakes that cost people days"),
    "gradients": ("pipeline", "Which gradients to reduce, and their scale"),
    "gradient norm": ("pipeline", "Which gradients to reduce, and their scale"),
    "uneven batch": ("pipeline", "Microbatches"),
    "uneven layers": ("pipeline", "What each device holds"),
    "communication": ("pipeline", "Microbatches"),
    "bubble": ("pipeline", "The bubble"),
    "permute bytes": ("pipeline", "What is sent"),
    "loss bytes": ("pipeline", "The loss, once or in parts"),
    "FLOPs": ("pipeline", "The loss, once or in parts"),
    "all-reduce bytes": ("pipeline", "Which gradients to reduce, and their scale"),
    "live temporaries": ("pipeline", "What the backward pass keeps"),
    "other collectives": ("pipeline", "What is sent"),
    "split_microbatches.values": ("pipeline", "Microbatches"),
    "pipeline_tick.values": ("pipeline", "The bubble"),
    "pipeline_tick.gradients": ("pipeline", "The bubble"),
    "execute_pipeline.values": ("pipeline", "The bubble"),
    "execute_pipeline.gradients": ("pipeline", "The bubble"),
    "pipeline_loss.values": ("pipeline", "Which gradients to reduce, and their scale"),
    "pipeline_train_step.values": ("pipeline", "Which gradients to reduce, and their scale"),
}

PROMISES = {
    "split_microbatches": {
        "Microbatch 0 is the first": ("values",),
        "raise a `ValueError` that names both numbers": ("uneven batch",),
        "| each leaf |": ("values",),
        "| communication | none |": ("communication",),
        "The same tree with leaves": ("values",),
        "ValueError: The rows cannot be split": ("uneven batch",),
    },
    "pipeline_tick": {
        "the microbatch's number as an integer": ("values",),
        "So you must know which microbatch": ("values", "gradients"),
        "| `microbatches` |": ("values",),
        "| `arrived`, and both results |": ("values",),
        "one `ppermute` per tick": ("permute bytes",),
        "any other collective: none": ("other collectives",),
        "and at gradients: of the weights": ("gradients",),
        "``(y, sent)``": ("values",),
    },
    "execute_pipeline": {
        "Draw a table": (),
        "Your function must work for any `S` and `M`": ("values", "gradients"),
        "No garbage may reach a result": ("values",),
        "| bubble, for 8 stages": ("bubble",),
        "| `ppermute` | at most one per tick": ("permute bytes",),
        "activations are never gathered": ("other collectives",),
        "On the last stage, its output": ("values",),
    },
    "pipeline_loss": {
        "Padding must not count": ("values", "gradients"),
        "The loss that you return is that mean": ("values",),
        "A number that is typed as the same": (),
        "gradient of embedding and head is its own share": ("gradients", "gradient norm"),
        "with the key `layer_key(key, m, l)`": ("values", "gradients"),
        "Reject a number of layers that the stages do not divide": ("uneven layers",),
        "| `ppermute` | as in `execute_pipeline`": ("permute bytes",),
        "| any other collectives | together": ("loss bytes",),
        "stretch goal (no points): FLOPs": ("FLOPs",),
        "Make the plain version work": (),
        "The mean over all unmasked rows or tokens, a scalar": ("values",),
        "ValueError: The layers cannot": ("uneven layers",),
    },
    "pipeline_train_step": {
        "So keep only a stage's *input*": ("live temporaries",),
        "each stage has a share of their gradient": ("gradients", "gradient norm"),
        "`key` is the same on every device": (),
        "Index `i` along `data_axis` uses": ("values", "gradients"),
        "| live temporaries |": ("live temporaries",),
        "| all-reduce | over `data_axis` once: each leaf": ("all-reduce bytes",),
        "recomputing a stage sends nothing": ("permute bytes",),
        "| any other collectives | as in": ("loss bytes",),
        "MiB of temporaries": ("live temporaries",),
        "Parameters after one step and after three": ("values", "gradients"),
        "``(params, loss)``": ("values",),
    },
}

CONTRACT = Contract(
    "pipeline",
    (SPLIT_MICROBATCHES, PIPELINE_TICK, EXECUTE_PIPELINE, PIPELINE_LOSS, PIPELINE_TRAIN_STEP),
    question_points=2,
    explained_in=EXPLAINED_IN,
)

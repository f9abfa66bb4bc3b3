"""The contract of ``tp_transformer``: a Transformer over ``data`` x ``tensor``."""

from autograder.chapters.tp_transformer.step import TP_TRANSFORMER_STEP
from autograder.chapters.tp_transformer.tasks import (
    PARALLEL_TRANSFORMER_BLOCK,
    TP_TRANSFORMER_BLOCK,
    VOCAB_PARALLEL_EMBED,
    VOCAB_PARALLEL_LOSS,
)
from autograder.contract.task import Contract

READ = {
    "values": ("tp_transformer", "Mistakes that cost people days"),
    "gradients": ("tp_transformer", "Whose gradient, and how large"),
    "gradient norm": ("tp_transformer", "Whose gradient, and how large"),
    "all-gather bytes": ("tp_transformer", "What is sent"),
    "reduce-scatter bytes": ("tp_transformer", "What is sent"),
    "all-reduce bytes": ("tp_transformer", "What is sent"),
    "bytes sent": ("tp_transformer", "A vocabulary in parts"),
    "activation bytes": ("tp_transformer", "What is sent"),
    "other collectives": ("tp_transformer", "What is sent"),
    "predicted time": ("tp_transformer", "One after the other, or side by side"),
    "exposed communication": ("tp_transformer", "Rings in the layers"),
    "largest temporary": ("tp_transformer", "A vocabulary in parts"),
}

CONTRACT = Contract(
    "tp_transformer",
    (
        TP_TRANSFORMER_BLOCK,
        PARALLEL_TRANSFORMER_BLOCK,
        VOCAB_PARALLEL_EMBED,
        VOCAB_PARALLEL_LOSS,
        TP_TRANSFORMER_STEP,
    ),
    question_points=2,
    read=READ,
)

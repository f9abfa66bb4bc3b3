"""The contract of ``sequence_parallel``: what a split layer saves and sends, and attention over split sequences."""

from autograder.chapters.sequence_parallel.tasks import (
    ENTER_TENSOR_REGION,
    LEAVE_TENSOR_REGION,
    SELECTIVE_RECOMPUTE,
    SP_BLOCK,
    ULYSSES_ATTENTION,
)
from autograder.contract.task import Contract

READ = {
    "values": ("sequence_parallel", "Mistakes that cost people days"),
    "gradients": ("sequence_parallel", "A pair and its transposes"),
    "gradient norm": ("sequence_parallel", "A pair and its transposes"),
    "all-gather bytes": ("sequence_parallel", "What is sent"),
    "reduce-scatter bytes": ("sequence_parallel", "What is sent"),
    "all-reduce bytes": ("sequence_parallel", "What is sent"),
    "other collectives": ("sequence_parallel", "What is sent"),
    "live temporaries": ("sequence_parallel", "What a layer saves"),
    "FLOPs": ("sequence_parallel", "Recompute the scores alone"),
    "all-to-all bytes": ("sequence_parallel", "Ulysses: heads instead of tokens"),
    "largest temporary": ("sequence_parallel", "Ulysses: heads instead of tokens"),
    "sp_block.gradients": ("sequence_parallel", "Leaves that are whole"),
    "selective_recompute.gradients": ("sequence_parallel", "Leaves that are whole"),
    "selective_recompute.live temporaries": ("sequence_parallel", "Recompute the scores alone"),
    "ulysses_attention.values": ("sequence_parallel", "Ulysses: heads instead of tokens"),
    "ulysses_attention.gradients": ("sequence_parallel", "Ulysses: heads instead of tokens"),
    "ulysses_attention.other collectives": ("sequence_parallel", "Ulysses: heads instead of tokens"),
}

PROMISES: dict[str, dict[str, tuple[str, ...]]] = {}

CONTRACT = Contract(
    "sequence_parallel",
    (ENTER_TENSOR_REGION, LEAVE_TENSOR_REGION, SP_BLOCK, SELECTIVE_RECOMPUTE, ULYSSES_ATTENTION),
    question_points=2,
    read=READ,
)

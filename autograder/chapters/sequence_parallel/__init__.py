"""The contract of ``sequence_parallel``: what a split layer saves and sends, and attention over split sequences."""

from autograder.chapters.sequence_parallel.tasks import (
    ENTER_TENSOR_REGION,
    LEAVE_TENSOR_REGION,
    SELECTIVE_RECOMPUTE,
    SP_BLOCK,
    ULYSSES_ATTENTION,
)
from autograder.contract.task import Contract

EXPLAINED_IN = {
    "values": ("sequence_parallel", "Mistakes that cost people days"),
    "gradients": ("sequence_parallel", "A pair and its transposes"),
    "gradient norm": ("sequence_parallel", "A pair and its transposes"),
    "all-gather bytes": ("sequence_parallel", "What is sent"),
    "reduce-scatter bytes": ("sequence_parallel", "What is sent"),
    "all-reduce bytes": ("sequence_parallel", "What is sent"),
    "other collectives": ("sequence_parallel", "What is sent"),
    "live temporaries": ("sequence_parallel", "What a layer saves"),
    "FLOPs": ("sequence_parallel", "Recompute only the scores"),
    "all-to-all bytes": ("sequence_parallel", "Ulysses: heads instead of tokens"),
    "largest temporary": ("sequence_parallel", "Ulysses: heads instead of tokens"),
    "sp_block.gradients": ("sequence_parallel", "Leaves that are whole"),
    "selective_recompute.gradients": ("sequence_parallel", "Leaves that are whole"),
    "selective_recompute.live temporaries": ("sequence_parallel", "Recompute only the scores"),
    "ulysses_attention.values": ("sequence_parallel", "Ulysses: heads instead of tokens"),
    "ulysses_attention.gradients": ("sequence_parallel", "Ulysses: heads instead of tokens"),
    "ulysses_attention.other collectives": ("sequence_parallel", "Ulysses: heads instead of tokens"),
}

# Pieces of the notebook's text, and the facts that enforce them.
NUMBERS = ("values", "gradients", "gradient norm")
GATHERED, SCATTERED, SUMMED, OTHER = (
    ("all-gather bytes",),
    ("reduce-scatter bytes",),
    ("all-reduce bytes",),
    ("other collectives",),
)
ALL_SENT = (*GATHERED, *SCATTERED, *SUMMED, *OTHER)
PAIR = {"| `split=True` | one": (*GATHERED, *SCATTERED), "| any other collective |": OTHER}
PROMISES: dict[str, dict[str, tuple[str, ...]]] = {
    "enter_tensor_region": {
        "Take one token `x`, which each of four devices": (),
        "what must come back has the form of `x`": ("gradients",),
        "becomes one that *varies* over it": (),
        "In both cases, a device needs all tokens inside": ("values",),
        "each device gets the complete gradient of its own tokens": ("gradients", "gradient norm"),
        "every device gets the complete gradient of all tokens": ("gradients",),
        "| `x` | `[batch, seq/tensor, width]`, varying |": (),
        "| result | `[batch, seq, width]`, varying |": ("values",),
        **PAIR,
        "| `split=False` | nothing |": SUMMED,
        "All tokens, ``[batch, seq, width]``, varying": ("values",),
    },
    "leave_tensor_region": {
        "Return the sum over the devices in the form that `x` came in": ("values",),
        "each share has the same derivative as the sum": ("gradients", "gradient norm"),
        "A whole result must be typed as the same": ("gradients", "gradient norm"),
        "| `x` | `[batch, seq, width]`, a share on each device |": (),
        "| result | `[batch, seq/tensor, width]`, varying |": ("values",),
        **PAIR,
        "| `split=False` | one all-reduce": SUMMED,
        "The sum: this device's tokens": ("values",),
    },
    "sp_block": {
        "`x` and the result are in parts": ("values",),
        "the first half is for what attention adds": ("values",),
        "enter typed as the same on every device of `axis_name`": (),
        "leave room for what one layer's backward pass needs": (),
        "Then their gradients come out complete and the same everywhere": ("gradients", "gradient norm"),
        "`q`, `k` and `v` come from one gather": GATHERED,
        "| `x` and the result |": ("values",),
        "| split leaves |": ("gradients",),
        "| | `out` with `kernel`": ("gradients",),
        "| | `up` with `kernel`": ("gradients",),
        "| | `down` with `kernel`": ("gradients",),
        "| whole leaves |": ("gradients",),
        "| all-gathers, each of": GATHERED,
        "| reduce-scatters, each of": SCATTERED,
        "| all-reduce | none |": SUMMED,
        "| any other collective |": OTHER,
        "| live temporaries of 12 layers |": ("live temporaries",),
        "| FLOPs of matmuls |": ("FLOPs",),
        "This device's part of each sequence, like ``x``.": ("values",),
    },
    "selective_recompute": {
        "So recompute them, and nothing else that contains a product": ("live temporaries", "FLOPs"),
        "the same values, gradients and collectives": NUMBERS,
        "| collectives | those of `sp_block` |": ALL_SENT,
        "| live temporaries of 12 layers |": ("live temporaries",),
        "| FLOPs of matmuls |": ("FLOPs",),
        "This device's part of each sequence, like ``x``.": ("values",),
    },
    "ulysses_attention": {
        "Query head `i` uses KV head": ("values",),
        "`n` divides `num_heads`": (),
        "a KV head goes to all devices whose queries use it": NUMBERS,
        "No other cases occur": (),
        "But heads do not look at each other": (),
        "Half of what a device has stays": (),
        "Use `attend_in_chunks`:": ("largest temporary",),
        "Attention is causal over the whole sequence": ("values",),
        "has an array with an element for each pair of tokens": ("largest temporary",),
        "| all-to-all of queries and results |": ("all-to-all bytes",),
        "| all-to-all of keys and values |": ("all-to-all bytes",),
        "| any other collective |": OTHER,
        "| largest temporary |": ("largest temporary",),
        "The output of attention for this device's tokens, like ``q``.": ("values",),
    },
}

CONTRACT = Contract(
    "sequence_parallel",
    (ENTER_TENSOR_REGION, LEAVE_TENSOR_REGION, SP_BLOCK, SELECTIVE_RECOMPUTE, ULYSSES_ATTENTION),
    question_points=2,
    explained_in=EXPLAINED_IN,
)

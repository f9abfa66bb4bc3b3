"""The contract of ``tp_transformer``: a Transformer over ``data`` x ``tensor``."""

from autograder.chapters.tp_transformer.step import TP_TRANSFORMER_STEP
from autograder.chapters.tp_transformer.tasks import (
    PARALLEL_TRANSFORMER_BLOCK,
    TP_TRANSFORMER_BLOCK,
    VOCAB_PARALLEL_EMBED,
    VOCAB_PARALLEL_LOSS,
)
from autograder.contract.task import Contract

EXPLAINED_IN = {
    "values": ("tp_transformer", "Mistakes that cost people days"),
    "gradients": ("tp_transformer", "Which gradients to reduce, and their scale"),
    "gradient norm": ("tp_transformer", "Which gradients to reduce, and their scale"),
    "all-gather bytes": ("tp_transformer", "What is sent"),
    "reduce-scatter bytes": ("tp_transformer", "What is sent"),
    "all-reduce bytes": ("tp_transformer", "What is sent"),
    "bytes sent": ("tp_transformer", "The vocabulary, split"),
    "activation bytes": ("tp_transformer", "What is sent"),
    "other collectives": ("tp_transformer", "What is sent"),
    "predicted time": ("tp_transformer", "Sequential or parallel blocks"),
    "bytes in one piece": ("tp_transformer", "Rings in the layers"),
    "exposed communication": ("tp_transformer", "Rings in the layers"),
    "largest temporary": ("tp_transformer", "The vocabulary, split"),
    "tp_transformer_block.values": ("tp_transformer", "What a block is given"),
    "parallel_transformer_block.values": ("tp_transformer", "Sequential or parallel blocks"),
    "vocab_parallel_embed.values": ("tp_transformer", "The vocabulary, split"),
    "vocab_parallel_embed.gradients": ("tp_transformer", "The vocabulary, split"),
    "vocab_parallel_loss.values": ("tp_transformer", "The vocabulary, split"),
    "vocab_parallel_loss.gradients": ("tp_transformer", "The vocabulary, split"),
    "tp_transformer_step.predicted time": ("tp_transformer", "Rings in the layers"),
    "tp_transformer_step.values": ("tp_transformer", "Which gradients to reduce, and their scale"),
}

# Facts that enforce each sentence of a specification; none where it explains.
NUMBERS, GATHERED, SCATTERED, SUMMED, OTHER = (
    ("values", "gradients", "gradient norm"),
    ("all-gather bytes",),
    ("reduce-scatter bytes",),
    ("all-reduce bytes",),
    ("other collectives",),
)
PROMISES: dict[str, dict[str, tuple[str, ...]]] = {
    "tp_transformer_block": {
        "each must draw its own mask": ("values",),
        "the same on every device of `axis_name`": (),
        "the first half for the output of attention, the second for the output of the MLP": ("values",),
        "| `x` and the result |": ("values",),
        "| split leaves |": ("gradients",),
        "| | `out` with `kernel`": ("gradients",),
        "| | `up` and `down` as for `tp_mlp` |": ("gradients",),
        "| whole leaves |": ("gradients",),
        "| all-gathers, each of": GATHERED,
        "| reduce-scatters, each of": SCATTERED,
        "| any other collective |": (*SUMMED, *OTHER),
        "come from one product": GATHERED,
        "all communication must go through them": SUMMED,
        "Gradients of split leaves must be those of one device": NUMBERS,
        "This device's part of each sequence, like ``x``.": ("values",),
    },
    "parallel_transformer_block": {
        "So one all-gather and one reduce-scatter": (*GATHERED, *SCATTERED),
        "There is one dropout mask": ("values",),
        "| all-gathers |": GATHERED,
        "| reduce-scatters |": SCATTERED,
        "| any other collective |": (*SUMMED, *OTHER),
        "| predicted time on 8 H100s |": ("predicted time",),
        "This device's part of each sequence, like ``x``.": NUMBERS,
    },
    "vocab_parallel_embed": {
        "exactly one device has the embedding": (),
        "which row of its part can a device": ("values",),
        "`max_seq` may be larger than `seq`": ("values",),
        "| reduce-scatter |": SCATTERED,
        "| all-gather |": GATHERED,
        "| any other collective |": OTHER,
        "``[batch, seq/axis, width]``.": NUMBERS,
    },
    "vocab_parallel_loss": {
        "Here you need the largest over *all* devices": ("values",),
        "one part of the vocabulary has logits 300 above another's": ("values", "gradients"),
        "no device ever needs more": (),
        "Use the `gather_matmul` passed to you": ("bytes sent",),
        "`targets` are whole": (),
        "the same on every device of the axis, and typed as such": NUMBERS,
        "| largest temporary |": ("largest temporary",),
        "| sent, forward and backward |": ("bytes sent",),
        "The mean over all tokens, a scalar": ("values",),
    },
    "tp_transformer_step": {
        "every gradient must come out at the scale of a single device": ("gradients", "gradient norm"),
        "Take the smallest model that has both kinds of leaf": (),
        "pass `ring_gather_matmul` and `matmul_ring_scatter` to the blocks and the loss": (
            "bytes in one piece",
            "exposed communication",
        ),
        "`key` is the same on every device": (),
        "Index `i` along `data_axis` uses": ("values",),
        "Update by plain SGD": ("values",),
        "| exposed communication, 8 H100s |": ("exposed communication",),
        "| predicted time |": ("predicted time",),
        "| largest temporary |": ("largest temporary",),
        "| activations sent |": ("activation bytes",),
        "| all-reduce |": SUMMED,
        "the mean loss over all sequences, the same on every device": ("values",),
    },
}

CONTRACT = Contract(
    "tp_transformer",
    (TP_TRANSFORMER_BLOCK, PARALLEL_TRANSFORMER_BLOCK, VOCAB_PARALLEL_EMBED, VOCAB_PARALLEL_LOSS, TP_TRANSFORMER_STEP),
    question_points=2,
    explained_in=EXPLAINED_IN,
)

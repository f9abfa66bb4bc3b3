"""The contract of ``context_parallel``: attention over a sequence that no device holds whole."""

from autograder.chapters.context_parallel.step import CP_TRANSFORMER_STEP
from autograder.chapters.context_parallel.tasks import MERGE_ATTENTION, RING_ATTENTION, ZIGZAG_ORDER
from autograder.contract.task import Contract

EXPLAINED_IN = {
    "values": ("context_parallel", "Mistakes that cost people days"),
    "gradients": ("context_parallel", "The backward pass"),
    "gradient norm": ("context_parallel", "A whole step"),
    "permute bytes": ("context_parallel", "What it costs"),
    "all-reduce bytes": ("context_parallel", "A whole step"),
    "other collectives": ("context_parallel", "A ring of keys and values"),
    "live temporaries": ("context_parallel", "What it costs"),
    "exposed communication": ("context_parallel", "A ring of keys and values"),
    "predicted time": ("context_parallel", "The same work for everyone"),
    "most loaded device": ("context_parallel", "The same work for everyone"),
    "merge_attention.values": ("context_parallel", "Two results into one"),
    "merge_attention.gradients": ("context_parallel", "Two results into one"),
    "ring_attention.values": ("context_parallel", "A ring of keys and values"),
    "zigzag_order.values": ("context_parallel", "The same work for everyone"),
    "cp_transformer_step.values": ("context_parallel", "A whole step"),
    "cp_transformer_step.gradients": ("context_parallel", "A whole step"),
}

NUMBERS, STEP = ("values", "gradients"), ("values", "gradients", "gradient norm")
SENT, OTHERS, HELD, TIME = ("permute bytes",), ("other collectives",), ("live temporaries",), ("predicted time",)
# Pieces of the notebook's text, and the facts that enforce them.
PROMISES: dict[str, dict[str, tuple[str, ...]]] = {
    "merge_attention": {
        "To combine the means over two sets, you must know": (),
        "That sum overflows easily": ("values",),
        "Two log-sum-exps can be subtracted exactly there": ("values",),
        "Merging must leave the other result unchanged": ("values",),
        "The gradient of such a query is 0, never NaN.": ("gradients",),
        "| log-sum-exps |": NUMBERS,
        "| values and gradients |": NUMBERS,
        "replace `x` before `f` sees it": (),
        "``(out, lse)`` for the keys of both.": NUMBERS,
    },
    "ring_attention": {
        "A sequence is cut into equal chunks": (),
        "It skips every pair of chunks in which no query sees a key.": (),
        "send the keys and values that you have to the next device": SENT,
        "must end on the device that the keys came from": ("gradients",),
        "Write the derivative with `jax.custom_vjp`": HELD,
        "Compute everything else": (),
        "A sum should not wait": ("exposed communication",),
        "So send it at the beginning of a step and, at the end, add your contribution": (),
        "one more transfer at the end brings it home": (),
        "| bytes sent, forward |": SENT,
        "| bytes sent, forward and backward |": SENT,
        "| any other collective |": OTHERS,
        "| live temporaries, forward and backward |": HELD,
        "| exposed communication on 8 H100s |": ("exposed communication",),
        "| predicted time of a step on 8 H100s |": TIME,
        "There may be fewer heads of keys and values than of queries.": NUMBERS,
        "Any axis size works, 1 included": NUMBERS,
        "a loop's carry must keep its type": (),
        "The attention of this device's queries": ("values",),
    },
    "zigzag_order": {
        "every device computes the same number of pairs": ("most loaded device",),
        "| chunks |": ("values",),
        "| FLOPs of the device with the most work |": ("most loaded device",),
        "| predicted time on 8 H100s |": TIME,
        "For each device a pair of chunk numbers": ("values",),
    },
    "cp_transformer_step": {
        "With two chunks on a device, its positions are not contiguous.": ("values",),
        "the chunk decides, not the device": ("values",),
        "The loss is the mean over all tokens that count, on all devices": ("values",),
        "each device has a share of every leaf's gradient, and all shares are added": ("gradients", "gradient norm"),
        "Keys and values that travel do not change that": (),
        "Its attention then goes around the ring once more:": SENT,
        "The returned loss is the same on every device.": ("values",),
        "keep each layer's input, and compute the layer again": HELD,
        "Update by plain SGD": ("values",),
        "| all-reduce |": ("all-reduce bytes",),
        "| permutes |": SENT,
        "| any other collective |": OTHERS,
        "| live temporaries |": HELD,
        "the mean loss over all unmasked tokens, the same on every device": STEP,
    },
}

CONTRACT = Contract(
    "context_parallel",
    (MERGE_ATTENTION, RING_ATTENTION, ZIGZAG_ORDER, CP_TRANSFORMER_STEP),
    question_points=2,
    explained_in=EXPLAINED_IN,
)

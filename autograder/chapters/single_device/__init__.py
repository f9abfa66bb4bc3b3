"""The contract of ``single_device``: make full use of one device."""

from __future__ import annotations

from autograder.chapters.single_device.memory import ACCUMULATE_GRADIENTS, CHUNKED_ATTENTION, REMAT_LAYERS, SCAN_LAYERS
from autograder.chapters.single_device.precision import MIXED_PRECISION_LOSS, SCALED_STEP
from autograder.contract.task import Contract

EXPLAINED_IN = {
    "values": ("single_device", "Mistakes that cost people days"),
    "gradients": ("single_device", "Mistakes that cost people days"),
    "gradient norm": ("single_device", "Accumulating gradients"),
    "gradient error": ("single_device", "Numbers with fewer bits"),
    "product dtypes": ("single_device", "Numbers with fewer bits"),
    "float32 functions and sums": ("single_device", "Numbers with fewer bits"),
    "program size": ("single_device", "Depth as a loop"),
    "live temporaries": ("single_device", "Recomputing instead of keeping"),
    "FLOPs": ("single_device", "Recomputing instead of keeping"),
    "losses": ("single_device", "Scaling the loss"),
    "skipped steps": ("single_device", "Scaling the loss"),
    "float32 parameters": ("single_device", "Scaling the loss"),
    "scale": ("single_device", "Scaling the loss"),
    "good steps": ("single_device", "Scaling the loss"),
    "largest temporary": ("single_device", "Attention in chunks"),
    "mixed_precision_loss.values": ("single_device", "Numbers with fewer bits"),
    "mixed_precision_loss.gradients": ("single_device", "Numbers with fewer bits"),
    "accumulate_gradients.values": ("single_device", "Accumulating gradients"),
    "accumulate_gradients.gradients": ("single_device", "Accumulating gradients"),
    "accumulate_gradients.live temporaries": ("single_device", "Accumulating gradients"),
    "scan_layers.values": ("single_device", "Depth as a loop"),
    "scan_layers.gradients": ("single_device", "Depth as a loop"),
    "remat_layers.values": ("single_device", "Recomputing instead of keeping"),
    "remat_layers.gradients": ("single_device", "Recomputing instead of keeping"),
    "chunked_attention.values": ("single_device", "Attention in chunks"),
    "chunked_attention.gradients": ("single_device", "Attention in chunks"),
    "chunked_attention.live temporaries": ("single_device", "Attention in chunks"),
    "chunked_attention.FLOPs": ("single_device", "Attention in chunks"),
}

# The facts that enforce each sentence of a specification; none if the sentence only explains.
NUMBERS = ("values", "gradients")
PROMISES: dict[str, dict[str, tuple[str, ...]]] = {
    "mixed_precision_loss": {
        "do not tolerate it": (),
        "and at most S positions": ("values",),
        "Write the same Transformer in mixed precision": ("product dtypes", "float32 functions and sums"),
        "both operands of every matmul, forward and backward": ("product dtypes",),
        "activations between products, as the memory limit requires": ("live temporaries",),
        "parameters, and their gradients": ("gradients",),
        "norms, from the squares to the product with `scale`": ("float32 functions and sums",),
        "both softmaxes, over the scores and in the loss; the loss itself": ("float32 functions and sums",),
        "every sum outside a matmul, including those in the backward pass": ("float32 functions and sums",),
        "the softmax has to subtract its maximum": ("values",),
        "within 2^-9 of the float32 loss": ("values",),
        "within 2^-4 of the leaf's largest element": ("gradients",),
        "within 2^-5 of the leaf's norm": ("gradient error",),
        "at most 0.7 times the float32 version's": ("live temporaries",),
        "Its gradient with respect to ``params`` is float32.": NUMBERS,
    },
    "accumulate_gradients": {
        "Activations grow with the number of rows": (),
        "compute their gradients one after the other, and take the mean": ("gradient norm", *NUMBERS),
        "Only one running total of the gradient may exist": ("live temporaries",),
        "Use `lax.scan` over the microbatches": ("program size",),
        "no more for 24 microbatches than for 8": ("program size",),
        "| matmuls in the program's text, 24 microbatches |": ("program size",),
        "at most 1.15 times the reference's, which holds": ("live temporaries",),
        "at most 1.15 times the reference's: no pass is run twice": ("FLOPs",),
        "must equal those of the whole batch": NUMBERS,
        "the mean loss over the whole batch, and its gradient": ("gradient norm", *NUMBERS),
    },
    "scan_layers": {
        "no more for 48 layers than for 24": ("program size",),
        "| matmuls in the program's text, 48 layers |": ("program size",),
        "must equal those of a Python loop": ("gradient norm", *NUMBERS),
        "The output of the last layer, in the shape of ``x``": ("values",),
    },
    "remat_layers": {
        "Keep little enough to meet the memory limit": ("live temporaries", "FLOPs"),
        "at most 0.35 times those without `jax.checkpoint`": ("live temporaries",),
        "at most 4/3 of those without": ("FLOPs",),
        "must equal those of a Python loop": ("gradient norm", *NUMBERS),
        "The output of the last layer, in the shape of ``x``": ("values",),
    },
    "scaled_step": {
        "multiply the loss by a large `scale` before the backward pass, and divide the gradients by it": ("values",),
        "A step in which any element of any gradient is infinite or NaN is skipped": ("skipped steps",),
        "| finite, and it is that step |": ("scale", "good steps"),
        "operands of every matmul": ("product dtypes",),
        "| parameters and losses |": ("values", "losses"),
        "`scale`, `good_steps`, parameters after a skipped step, and those whose gradient is zero": (
            *("scale", "good steps", "skipped steps"),
            "float32 parameters",
        ),
        "Return the plain loss": ("losses",),
        "the loss before the update, without the scale, float32": ("losses",),
    },
    "chunked_attention": {
        "Recompute them.": ("largest temporary", "live temporaries"),
        "| largest temporary |": ("largest temporary",),
        "at most 0.4 times the plain version's": ("live temporaries",),
        "at most 1.35 times the plain version's": ("FLOPs",),
        "since scores beyond ±200 occur": NUMBERS,
        "Scores may rise or fall along the keys": NUMBERS,
        "Everything is float32": NUMBERS,
        "For each query the mean of the values up to its position": ("values",),
    },
}

CONTRACT = Contract(
    "single_device",
    (MIXED_PRECISION_LOSS, ACCUMULATE_GRADIENTS, SCAN_LAYERS, REMAT_LAYERS, SCALED_STEP, CHUNKED_ATTENTION),
    question_points=2,
    explained_in=EXPLAINED_IN,
)

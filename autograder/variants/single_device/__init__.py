"""Right answers for ``single_device`` in another style: each must pass every fact."""

from autograder.variants.single_device import (
    accumulate_gradients,
    chunked_attention,
    chunked_attention_derivative,
    mixed_precision_loss,
    remat_layers,
    scaled_step,
    scan_layers,
)

VARIANTS = {
    "mixed_precision_loss": mixed_precision_loss.VARIANTS,
    "accumulate_gradients": accumulate_gradients.VARIANTS,
    "scan_layers": scan_layers.VARIANTS,
    "remat_layers": remat_layers.VARIANTS,
    "scaled_step": scaled_step.VARIANTS,
    "chunked_attention": (*chunked_attention.VARIANTS, *chunked_attention_derivative.VARIANTS),
}

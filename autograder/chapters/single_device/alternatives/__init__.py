"""Right answers for ``single_device`` in another style: each must pass every fact."""

from autograder.chapters.single_device.alternatives import (
    accumulate_gradients,
    chunked_attention,
    chunked_attention_derivative,
    mixed_precision_loss,
    remat_layers,
    scaled_step,
    scan_layers,
)

ALTERNATIVES = {
    "mixed_precision_loss": mixed_precision_loss.ALTERNATIVES,
    "accumulate_gradients": accumulate_gradients.ALTERNATIVES,
    "scan_layers": scan_layers.ALTERNATIVES,
    "remat_layers": remat_layers.ALTERNATIVES,
    "scaled_step": scaled_step.ALTERNATIVES,
    "chunked_attention": (*chunked_attention.ALTERNATIVES, *chunked_attention_derivative.ALTERNATIVES),
}

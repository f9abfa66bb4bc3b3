"""Wrong answers for ``single_device``: each works in some way, and each is a mistake that somebody has made."""

from autograder.chapters.single_device.mutants import accumulation, attention, layers, mixed_precision, scaling

MUTANTS = (
    *mixed_precision.MUTANTS,
    *accumulation.MUTANTS,
    *layers.MUTANTS,
    *scaling.MUTANTS,
    *attention.MUTANTS,
)

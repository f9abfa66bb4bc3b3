"""Wrong answers for ``fsdp``: each works in some way, and each is a mistake that somebody has made."""

from autograder.chapters.fsdp.mutants import hybrid, loss, parts, step

MUTANTS = (*parts.MUTANTS, *loss.MUTANTS, *step.MUTANTS, *hybrid.MUTANTS)

"""Wrong answers for ``tp_transformer``."""

from autograder.chapters.tp_transformer.mutants import blocks, embed, loss, parallel, step

MUTANTS = (*blocks.MUTANTS, *parallel.MUTANTS, *embed.MUTANTS, *loss.MUTANTS, *step.MUTANTS)

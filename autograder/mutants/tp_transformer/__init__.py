"""Wrong answers for ``tp_transformer``."""

from autograder.mutants.tp_transformer import blocks, embed, loss, parallel, step

MUTANTS = (*blocks.MUTANTS, *parallel.MUTANTS, *embed.MUTANTS, *loss.MUTANTS, *step.MUTANTS)

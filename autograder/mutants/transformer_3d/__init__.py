"""Wrong answers for ``transformer_3d``."""

from autograder.mutants.transformer_3d import choice, forward, init, step

MUTANTS = (*init.MUTANTS, *forward.MUTANTS, *step.MUTANTS, *choice.MUTANTS)

"""Wrong answers for ``transformer_3d``."""

from autograder.chapters.transformer_3d.mutants import choice, forward, init, step

MUTANTS = (*init.MUTANTS, *forward.MUTANTS, *step.MUTANTS, *choice.MUTANTS)

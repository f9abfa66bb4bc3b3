"""Wrong answers for ``tensor_parallel``: each works in some way, and each is a mistake that somebody has made."""

from autograder.chapters.tensor_parallel.mutants import attention, dense, init, mlp, step

MUTANTS = (*init.MUTANTS, *dense.MUTANTS, *mlp.MUTANTS, *attention.MUTANTS, *step.MUTANTS)

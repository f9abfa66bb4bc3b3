"""Wrong answers for ``async_tensor_parallel``."""

from autograder.chapters.async_tensor_parallel.mutants import both_ways, mlp, rings

MUTANTS = (*rings.MUTANTS, *both_ways.MUTANTS, *mlp.MUTANTS)

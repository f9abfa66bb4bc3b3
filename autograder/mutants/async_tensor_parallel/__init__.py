"""Wrong answers for ``async_tensor_parallel``."""

from autograder.mutants.async_tensor_parallel import both_ways, mlp, rings

MUTANTS = (*rings.MUTANTS, *both_ways.MUTANTS, *mlp.MUTANTS)

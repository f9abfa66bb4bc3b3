"""Wrong answers for ``collectives``."""

from autograder.mutants.collectives import rings

MUTANTS = (*rings.MUTANTS,)

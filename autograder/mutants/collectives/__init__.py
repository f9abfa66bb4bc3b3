"""Wrong answers for ``collectives``."""

from autograder.mutants.collectives import puzzles, rings

MUTANTS = (*rings.MUTANTS, *puzzles.MUTANTS)

"""Wrong answers for ``collectives``."""

from autograder.chapters.collectives.mutants import puzzles, rings

MUTANTS = (*rings.MUTANTS, *puzzles.MUTANTS)

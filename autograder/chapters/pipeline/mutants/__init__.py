"""Wrong answers for ``pipeline``: each works in some way, and each is a mistake that somebody has made."""

from autograder.chapters.pipeline.mutants import execute, loss, split, step, tick

MUTANTS = (*split.MUTANTS, *tick.MUTANTS, *execute.MUTANTS, *loss.MUTANTS, *step.MUTANTS)

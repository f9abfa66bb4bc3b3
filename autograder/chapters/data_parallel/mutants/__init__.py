"""Wrong answers for ``data_parallel``: each works in some way, and each is a mistake that somebody has made."""

from autograder.chapters.data_parallel.mutants import keys, overlap, step, sync

MUTANTS = (*keys.MUTANTS, *sync.MUTANTS, *step.MUTANTS, *overlap.MUTANTS)
"""Named wrong answers, each of which a fact must reject."""

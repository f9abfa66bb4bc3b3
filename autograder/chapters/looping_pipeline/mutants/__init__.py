"""Wrong answers for ``looping_pipeline``."""

from autograder.chapters.looping_pipeline.mutants import execute, schedule, step

MUTANTS = (*schedule.MUTANTS, *execute.MUTANTS, *step.MUTANTS)

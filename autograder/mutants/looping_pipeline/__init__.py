"""Wrong answers for ``looping_pipeline``."""

from autograder.mutants.looping_pipeline import execute, schedule, step

MUTANTS = (*schedule.MUTANTS, *execute.MUTANTS, *step.MUTANTS)

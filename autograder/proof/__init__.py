"""What shows that grading holds: attacks, fuzzing, mutants, alternatives, benchmarks. No installation has it."""

"""Evidence that grading is robust: attacks, fuzzing, mutants, alternatives, benchmarks. Never installed."""

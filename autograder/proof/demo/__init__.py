"""A small class to grade: eight submissions, and the verdicts they must get."""

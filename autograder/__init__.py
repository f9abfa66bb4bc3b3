"""Contracts of the exercises, the check that learners run, and official grading."""

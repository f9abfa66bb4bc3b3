"""Submissions that look alike, for a person to judge: evidence, never a verdict. Nothing of a student's is run."""

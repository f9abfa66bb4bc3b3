"""Which submissions look alike, for a person to judge: evidence and never a verdict. Nothing of a student's is run."""

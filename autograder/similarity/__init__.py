"""Find submissions that look alike, for a person to judge: evidence, never a verdict. No student code is run."""

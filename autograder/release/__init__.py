"""From a solution to its release: the exercise's notebook, and the reference's measurements."""

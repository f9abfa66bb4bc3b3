"""Official grading: what a class hands in, judged by processes that trust nothing of it."""

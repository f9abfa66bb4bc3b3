"""Official grading: a class's submissions, judged by processes that do not trust them."""

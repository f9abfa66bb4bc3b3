"""From a solution to what is released: the exercise's notebook, and what the reference measures."""

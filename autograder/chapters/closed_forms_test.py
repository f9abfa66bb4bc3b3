import jax

from autograder.chapters.closed_forms import split_spec


def test_rule_takes_the_largest_divisible_dim_and_the_first_of_equals():
    assert split_spec((16, 32), 8, 64, "data") == jax.P(None, "data")
    assert split_spec((34, 16), 8, 64, "data") == jax.P(None, "data")
    assert split_spec((16, 16), 8, 64, "data") == jax.P("data")
    assert split_spec((7, 9, 5), 8, 64, "data") == jax.P()
    assert split_spec((8, 4), 8, 64, "data") == jax.P()
    assert split_spec((64, 16, 8), 8, 64, "data", skip=1) == jax.P(None, "data")

"""The executor's settings, for the tests that compare the evaluator with it."""

import jax
import pytest


@pytest.fixture(scope="module")
def settings_of_the_executor():
    """64-bit inputs, and the executor's XLA options."""
    before = {name: jax.config.read(name) for name in ("jax_disable_most_optimizations", "jax_enable_x64")}
    for name in before:
        jax.config.update(name, True)
    yield
    for name, value in before.items():
        jax.config.update(name, value)

"""JAX settings of a learner's notebook do not reach the judge."""

import jax
import numpy as np
import pytest

from autograder.contract.task import load
from autograder.grading.outside import judge as judging
from autograder.grading.outside.jax_settings import PINNED, pinned

CHANGED = {f"jax_{name}": True for name in ("enable_x64", "debug_nans", "disable_jit")}
CHANGED |= {"jax_default_prng_impl": "rbg", "jax_numpy_rank_promotion": "raise"}
CHANGED |= {"jax_default_matmul_precision": "bfloat16"}


@pytest.fixture
def changed():
    before = {name: getattr(jax.config, name) for name in CHANGED}
    for name, value in CHANGED.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_settings_are_pinned_inside_and_the_learners_afterwards(changed):
    with pytest.raises(ZeroDivisionError), pinned():
        assert {name: getattr(jax.config, name) for name in PINNED} == PINNED
        raise ZeroDivisionError
    assert {name: getattr(jax.config, name) for name in CHANGED} == CHANGED


def test_pinned_values_are_those_that_jax_has_by_itself():
    assert {name: getattr(jax.config, name) for name in PINNED} == PINNED


def test_oracle_is_the_same_under_other_settings(changed):
    task = load("single_device").tasks[0]
    case = task.cases[0]
    judging._cached_case.cache_clear()
    with pinned():
        _, under_ours = judging.expected(judging.plan("single_device", task), case)
    assert {array.dtype for array in under_ours.values()} <= {np.dtype("float32"), np.dtype("int32"), np.dtype("bool")}
    judging._cached_case.cache_clear()

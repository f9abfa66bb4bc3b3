"""A patch edits the solution's source, and leaves the solution unchanged."""

import jax.numpy as jnp
import pytest

from autograder.chapters.mutant import patch
from solutions import collectives
from solutions.single_device import rms_norm, scan_layers


def test_a_patch_changes_the_function_and_leaves_the_solutions_own():
    wrong = patch(rms_norm, "forgets_the_scale", {" * scale": ""}, "values").function
    x = jnp.ones(4)
    assert wrong.__name__ == "forgets_the_scale"
    assert wrong(2 * x, x).sum() == pytest.approx(4) and rms_norm(2 * x, x).sum() == pytest.approx(8)


def test_a_patch_inside_another_function_reaches_what_calls_it():
    edits = {"lax.fori_loop(1, size": "lax.fori_loop(1, size - 1"}
    inside = collectives.ring_reduce_scatter
    wrong = patch(collectives.ring_all_reduce, "adds_one_too_few", edits, "values", inside=inside).function
    assert wrong.__name__ == "adds_one_too_few"
    assert wrong.__globals__["ring_reduce_scatter"] is not inside and collectives.ring_reduce_scatter is inside


@pytest.mark.parametrize(("text", "times"), [("lax.map", 0), ("stacked_params", 3)])
def test_an_edit_that_does_not_apply_exactly_once_is_refused(text, times):
    with pytest.raises(ValueError, match=f"moved: '{text}' occurs {times} times in scan_layers, expected once"):
        patch(scan_layers, "moved", {text: ""}, "values")

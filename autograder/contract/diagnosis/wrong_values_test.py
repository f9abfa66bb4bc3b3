"""Messages about wrong numbers: the factor, the mask, the order or the part that explains them."""

import re
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest

from autograder.contract.case import ModelSizes, Sizes
from autograder.contract.diagnosis.dropout import KEYS, RIGHT_MASKS
from autograder.contract.facts import (
    arrays_match,
    global_norm_matches,
)
from autograder.contract.facts_test import DRAWN, ONE_WRONG, evidence
from autograder.contract.task import Case
from course.program import Leaf


@dataclass(frozen=True, kw_only=True)
class Model(ModelSizes):
    num_microbatches: int = 0


KEY = Leaf("key", (2,), "uint32", ((),), "input")
MASKS = [np.random.default_rng(seed).random((4, 8)) > 0.25 for seed in range(2)]
CUBE = {"data": 2, "pipe": 2, "tensor": 4}
CAUSES = {
    "product of axes": (8 * DRAWN, "8 times too large, and axes 'data' and 'tensor', or 'pipe' and 'tensor' together"),
    "all axes": (DRAWN / 16, "16 times too small, and axes 'data', 'pipe' and 'tensor' together have that size"),
    "one of several": (2 * DRAWN, "2 times too large, and axis 'data' or 'pipe' has that size: sum or mean?"),
    "one or two": (4 * DRAWN, "axis 'tensor' has that size, or axes 'data' and 'pipe' together have that size"),
    "microbatches": (6 * DRAWN, "6 times too large, and there are as many microbatches: sum or mean?"),
    "no size": (5 * DRAWN, "All of it is 5 times what it should be."),
    "sign": (-DRAWN, "All of it has the opposite sign."),
    "nothing": (0 * DRAWN, "All of it is zero."),
    "rounded": (np.float32(jax.numpy.bfloat16(1) * DRAWN.astype(jax.numpy.bfloat16)), "off by a little, at most 0.002"),
    "nearly": (DRAWN * np.float32(1.004), "All of it is 1.004 times what it should be."),
    "other order": (DRAWN[::-1], "All its numbers are right, but in the wrong places"),
    "other masks": (DRAWN + 9 * np.float32(MASKS[0]) - 9 * MASKS[1], "as two masks of dropout agree by chance"),
    "mean of all": (np.tile(DRAWN.mean(0), (4, 1)), "Its 4 parts along dim 0 are all the same, the mean of what they"),
    "sum of pairs": (np.tile(DRAWN[:2] + DRAWN[2:], (2, 1)), "Its 2 parts along dim 0 are all the same, the sum of"),
    "one place": (ONE_WRONG, "Along dim 1 (of size 8), only index 5 is wrong."),
    "a row": (DRAWN + (np.arange(8) > 2), "Along dim 1 (of size 8), only indices 3 to 7 are wrong."),
}


def test_an_error_between_close_numbers_is_not_called_misplaced():
    for largest, misplaced in ((1.0006, False), (2.0, True)):
        numbers = np.linspace(1, largest, 32, dtype=np.float32).reshape(4, 8)
        e = replace(evidence(numbers[:, ::-1], secret=False), expected={"gradients/layers/up": numbers})
        fact = arrays_match("gradients", [e], "gradients", "A guess.")
        assert (fact.passed, "in the wrong places" in fact.message) == (False, misplaced)


@pytest.mark.parametrize(
    ("mesh", "question"), [(CUBE, "come, from which devices?"), ({"data": 1}, "in what order should they be?")]
)
def test_a_question_names_devices_only_if_there_are_several(mesh, question):
    e = replace(evidence(DRAWN[::-1], secret=False), case=Case("c", mesh, Model(width=1, hidden=1)))
    assert question in arrays_match("gradients", [e], "gradients", "A guess.").message


@pytest.mark.parametrize(
    ("split", "excerpt"),
    [((), "Along dim 0 (of size 4), only index 2 is"), (("pipe",), "Along dim 0 (of size 2), only")],
)
def test_indices_of_which_a_gradient_is_zero_throughout_are_named_though_the_rest_is_wrong_too(split, excerpt):
    idle = np.isin(np.arange(4), (0, 2) if split else (2,))[:, None]
    e = evidence(np.float32(np.where(idle, 0, DRAWN + np.cos(9 * DRAWN))), secret=False)
    leaf = Leaf("gradients/layers/up", (4, 8), "float32", (split, ()), "output")
    e = replace(e, case=Case("c", CUBE, Model(width=1, hidden=1)), outputs=(leaf,))
    message = arrays_match("gradients", [e], "gradients", "A guess.").message
    assert (
        excerpt in message
        and "zero throughout and should not be. Is what belongs there used, and does its gradient arrive? A guess."
        in message
    )


@pytest.mark.parametrize("secret", [False, True])
@pytest.mark.parametrize("cause", CAUSES)
def test_the_cause_of_wrong_numbers_is_reported_if_they_show_it(cause, secret):
    measured, excerpt = CAUSES[cause]
    case = Case("c", CUBE, Model(width=1, hidden=1, dropout=0.25, num_microbatches=6))
    e = replace(evidence(np.float32(measured), secret=secret), case=case, inputs=(KEY,))
    fact = arrays_match("gradients", [e], "gradients", "A guess.")
    assert (fact.passed, excerpt in fact.message) == (False, True), fact.message
    assert ("A guess." in fact.message) is (
        cause not in ("other masks", "rounded") and not re.search("sum or mean|mean or sum", fact.message)
    )


@pytest.mark.parametrize(
    ("factor", "excerpt"), [(1.004, "off by 0.004 times what it should be"), (8, "axes 'data' and 'tensor'")]
)
def test_a_single_number_is_off_by_a_difference_or_by_sizes(factor, excerpt):
    right = {"gradients/loss": np.float32(3)}
    wrong = {"gradients/loss": np.float32(3 * factor)}
    case = Case("c", CUBE, Sizes())
    e = replace(evidence(DRAWN, secret=True), case=case, expected=right, measured=wrong)
    assert excerpt in arrays_match("gradients", [e], "gradients").message
    if factor < 2:
        assert excerpt in global_norm_matches([e], "gradients").message


def test_other_cases_tell_which_axis_a_factor_is():
    """The same axes can have other names there; if a leaf is right there, its axis must have size 1."""
    model, cube = Model(width=1, hidden=1, num_microbatches=2), {"data": 2, "pipe": 2, "tensor": 2}
    base = evidence(2 * DRAWN, secret=True)
    first = replace(base, case=Case("cube", cube, model))
    message = arrays_match("gradients", [first], "gradients").message
    assert "axis 'data' or 'pipe' or 'tensor' has that size, or there are as many microbatches" in message
    three = Case("three", {"replica": 3, "stage": 1, "model": 2}, model.replace(num_microbatches=5))
    for measured, axis in ((3 * DRAWN, "data"), (2 * DRAWN, "tensor"), (DRAWN, "pipe")):
        other = replace(base, measured=dict.fromkeys(base.measured, np.float32(measured)), case=three)
        message = arrays_match("gradients", [first, other], "gradients").message
        assert f"2 times too large, and axis '{axis}' has that size: sum or mean?" in message, message


def test_all_axes_with_the_size_are_named_and_the_functions_own_is_the_first():
    """A case that is right with another choice, such as what is split, does not tell which axis it is."""
    model = Model(width=1, hidden=1, parallel=True)
    base = evidence(2 * DRAWN, secret=True)
    wrong = replace(base, case=Case("both", {"data": 2, "tensor": 2}, model))
    right = replace(base, measured=base.expected, case=Case("split", {"tensor": 4}, model.replace(parallel=False)))
    message = arrays_match("gradients", [right, wrong], "gradients").message
    assert "axis 'tensor' or 'data' has that size: sum or mean?" in message, message


def test_what_is_wrong_with_dropout_alone_is_a_matter_of_keys():
    base = replace(evidence(2.5 * DRAWN + 1, secret=True), inputs=(KEY,))
    model = Model(width=1, hidden=1)
    with_dropout = replace(base, case=Case("some", CUBE, model.replace(dropout=0.25)))
    without = replace(base, measured={name: DRAWN for name in base.measured}, case=Case("none", CUBE, model))
    excerpt = arrays_match("gradients", [without, with_dropout], "gradients", "A guess.").message
    assert "It is right in every case without dropout and wrong with it: is each mask drawn" in excerpt
    assert "A guess." not in excerpt
    cases = [replace(base, case=without.case), with_dropout]
    assert "dropout" not in arrays_match("gradients", cases, "gradients").message
    excerpt = arrays_match("gradients", [with_dropout], "gradients", "A guess.").message
    assert "A guess. There is dropout in every case here: is each mask drawn" in excerpt
    excerpt = arrays_match("gradients", [replace(with_dropout, inputs=())], "gradients").message
    assert "dropout" not in excerpt, "the function is given no key"


def test_masks_are_right_where_single_elements_are_dropped_and_not_where_nothing_reads_a_row():
    rng = np.random.default_rng(0)
    mask, drawn = rng.random((12, 6)) < 0.7, np.float32(1 + rng.random((12, 6)))
    unread = np.arange(12)[:, None] < 8
    base = replace(evidence(DRAWN, secret=True), inputs=(KEY,))
    base = replace(base, case=Case("some", CUBE, Model(width=1, hidden=1).replace(dropout=0.25)))
    for keep_mask, says in ((mask, True), (unread, False)):
        expected, wrong = drawn * keep_mask, (drawn + rng.standard_normal(drawn.shape).astype(np.float32)) * keep_mask
        e = replace(base, expected={"gradients": expected}, measured={"gradients": wrong}, outputs=())
        excerpt = arrays_match("gradients", [e], "gradients", "A guess.").message
        assert (RIGHT_MASKS in excerpt) is says and "A guess." in excerpt
        assert not (says and KEYS in excerpt), "the masks are right, so their keys are"


def test_wrong_leaves_are_named_where_there_are_several():
    names = [f"gradients/{name}" for name in ("a", "b", "c", "d")]
    e = replace(evidence(DRAWN, secret=True), expected={name: DRAWN for name in names})
    measured = {name: DRAWN if name in names[1:3] else DRAWN + 1 for name in names}
    excerpt = arrays_match("gradients", [replace(e, measured=measured)], "gradients").message
    assert excerpt.endswith("2 of 4 leaves are wrong here: a, d.")
    all_wrong = {name: DRAWN + 1 for name in names}
    assert (
        "All 4 leaves are wrong here."
        in arrays_match("gradients", [replace(e, measured=all_wrong)], "gradients").message
    )


def test_integers_are_not_searched_for_elsewhere_and_a_common_offset_is_reported():
    right = np.array([[0, 1], [2, 0], [1, 3]], np.int32)
    e = replace(evidence(DRAWN, secret=False), expected={"values": right})
    for measured, excerpt in (
        (right + 1, "All of it is 1 too large."),
        (np.maximum(right, 1), "All 2 that are wrong are 1 too large."),
        (np.minimum(right, 2), "The one that is wrong is 1 too small."),
    ):
        message = arrays_match("values", [replace(e, measured={"values": measured.astype(np.int32)})], "values").message
        assert excerpt in message and "belongs" not in message, message


@pytest.mark.parametrize(
    ("times", "says"),
    [
        (3, "Every row is off by 3 times `params/bias`: is it added on each device before a sum, or once"),
        (-0.75, "Every row is off by -0.75 times `params/bias`: is it added on each device"),
        (-1, "Every row lacks `params/bias`: where is it added?"),
        (1, "Every row is off by `params/bias`, which is added once too often: where should it be added?"),
    ],
)
def test_a_bias_that_every_row_has_too_often_is_named(times, says):
    bias = np.linspace(-1, 2, DRAWN.shape[1]).astype(np.float32)
    e = evidence(DRAWN + np.float32(times) * bias, secret=False, name="values/y")
    e = replace(e, drawn={"params/bias": bias, "params/scale": np.ones_like(bias)})
    assert says in arrays_match("values", [e], "values").message

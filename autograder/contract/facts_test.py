"""What facts say about wrong numbers: everything where inputs are public, no value where they are secret."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from autograder.contract.case import Sizes
from autograder.contract.facts import (
    arrays_match,
    bytes_at_most,
    bytes_sent,
    global_norm_matches,
    only_collectives,
    precise_in,
    products_of,
    resident_bytes,
    same_program_size,
    state_bytes,
    times_sent,
    worst,
)
from autograder.contract.task import Case, Evidence
from autograder.contract.verdict import Fact, Kind, conclude
from course.program import Collective, Costs, Leaf, Memory

DRAWN = np.random.default_rng(5).standard_normal((4, 8)).astype(np.float32)
ONE = DRAWN + np.eye(4, 8, 3, dtype=np.float32) * np.float32(0.5) * (np.arange(4) == 2)[:, None]


def evidence(measured, *, secret, name="gradients/layers/up"):
    case = Case("data=8", {"data": 8, "tensor": 1}, Sizes())
    return Evidence(
        case,
        (),
        (),
        {name: measured},
        {name: DRAWN},
        Costs(0, 0, 0, (), {}),
        Memory(0, 0, 0, 0, ()),
        "mine:3",
        secret=secret,
    )


def both(measured, secret):
    e = [evidence(measured, secret=secret)]
    return arrays_match("gradients", e, "gradients"), global_norm_matches(e, "gradients")


@pytest.mark.parametrize("measured", [8 * DRAWN, DRAWN / 8, ONE, -DRAWN, 0 * DRAWN, DRAWN + 100])
def test_secret_inputs_are_judged_alike_and_no_value_is_said(measured):
    norms = [float(np.linalg.norm(a)) for a in (measured, DRAWN)]
    values = [f"{abs(float(v)):.4g}" for v in (*measured.flat, *DRAWN.flat, *norms) if abs(v) > 1e-6 and v % 1]
    for public, secret in zip(both(measured, False), both(measured, True), strict=True):
        assert (public.passed, public.line, public.case) == (secret.passed, secret.line, secret.case)
        said = f"{secret.measured_text} {secret.limit_text} {secret.message}"
        assert [value for value in values if len(value) > 4 and value in said] == []
        if public.passed is False:
            assert any(value in f"{public.measured_text} {public.message}" for value in values), (
                "the public one says it"
            )


def test_a_secret_message_says_where_how_many_how_far_and_which_factor():
    wrong, norm = both(8 * DRAWN, True)
    at = list(map(int, np.unravel_index(np.argmax(np.abs(DRAWN)), DRAWN.shape)))
    assert wrong.message.startswith(
        f"leaf layers/up on mesh data=8 x tensor=1: 32 of 32 elements are wrong, the worst at {at}"
    )
    assert "by 7 times the largest expected one" in wrong.message
    assert "8 times too large, and axis 'data' has that size" in wrong.message
    assert "norm over all leaves is 8 times what it should be" in norm.message
    (single, _) = both(ONE, True)
    assert re.search(r"1 of 32 elements is wrong, the worst at \[2, 5\] by 0\.\d+ times", single.message)


def test_where_inputs_are_public_both_values_are_shown():
    wrong, norm = both(8 * DRAWN, False)
    assert re.search(r"measured -?[\d.]+, expected -?[\d.]+ at \[\d, \d\]", wrong.message)
    assert re.search(r"the norm over all leaves is [\d.]+ and should be [\d.]+", norm.message)


def test_a_tolerance_may_be_stated_and_none_means_to_the_last_bit():
    off = evidence(DRAWN * np.float32(1.001), secret=False)
    assert [arrays_match("gradients", [off], "gradients", tolerance=t).passed for t in (1e-2, 2e-5)] == [True, False]
    same = evidence(DRAWN.copy(), secret=False)
    assert arrays_match("gradients", [same], "gradients", tolerance=0).passed is True
    last = evidence(np.nextafter(DRAWN, 9, dtype=np.float32), secret=False)
    assert arrays_match("gradients", [last], "gradients", tolerance=0).passed is False


def test_functions_and_sums_in_another_dtype_are_named():
    found = replace(evidence(DRAWN, secret=True), costs=Costs(0, 0, 0, (), {}, 0, {"log of f32": 2, "sum of bf16": 3}))
    fact = precise_in("functions", [found], "f32", "Look here.")
    assert (fact.passed, fact.measured_text, fact.limit_text, fact.unit_text) == (False, "2 of 5", "5 of 5", "of f32")
    assert fact.message == "beside 2 of f32 there are 3 sum of bf16. Look here."
    assert fact.line == "mine:3", "nobody knows where"
    known = replace(found, costs=replace(found.costs, lines={"log of f32": "mine:8", "sum of bf16": "mine:9"}))
    assert precise_in("functions", [known], "f32", "").line == "mine:9"
    only = replace(found, costs=Costs(0, 0, 0, (), {}, 0, {"log of f32": 2}))
    assert precise_in("functions", [only], "f32", "").passed is True


def test_state_bytes_are_those_of_the_parts_that_a_device_holds():
    mesh = {"data": 4, "tensor": 2}
    assert resident_bytes((16, 8), jax.P(), mesh) == 512
    assert resident_bytes((16, 8), jax.P("data"), mesh) == 128
    assert resident_bytes((16, 8), jax.P(("data", "tensor")), mesh, itemsize=2) == 32
    assert resident_bytes((16, 8), jax.P("data", "tensor"), mesh) == 64
    split = Leaf("values/up", (16, 8), "float32", (("data",), ()), "result")
    e = replace(evidence(DRAWN, secret=False), case=Case("two axes", mesh, Sizes()), outputs=(split,))
    for form, passed in ((128, True), (512, False)):
        fact = state_bytes([e], lambda _, form=form: form, lambda _: 512)
        assert (fact.passed, fact.measured, fact.limit, fact.naive) == (passed, 128, form, 512)
        assert bool(fact.message) is not passed


def test_bytes_of_several_kinds_are_added_up_and_the_largest_is_named():
    sent = [
        Collective("reduce_scatter", ("data",), 8, 80, 70.0, 2, "mine:4", (20,), "f32"),
        Collective("all_gather", ("data",), 8, 10, 70.0, 3, "mine:5", (5, 2), "f32"),
        Collective("collective_permute", ("data",), 8, 999, 999.0, 1, "mine:6", (9,), "f32"),
    ]
    e = replace(evidence(DRAWN, secret=False), costs=Costs(0, 0, 0, tuple(sent), {}))
    kinds = ("reduce_scatter", "all_gather")
    assert bytes_at_most("bytes", [e], kinds, lambda _: 350, "").passed
    over = bytes_at_most("bytes", [e], kinds, lambda _: 349, "Look.")
    assert (over.passed, over.measured, over.limit, over.line) == (False, 350, 349, "mine:5")
    assert over.message.endswith("of f32[5x2]. Look.")
    assert bytes_at_most("bytes", [replace(e, costs=Costs(0, 0, 0, (), {}))], kinds, lambda _: 0, "").passed


def test_collectives_are_counted_up_to_a_number_and_over_one_axis_where_that_is_asked():
    reduces = Collective("all_reduce", ("data", "node"), 8, 80, 70.0, 2, "mine:4", (20,), "f32")
    sends = Collective("collective_permute", ("node",), 8, 10, 70.0, 3, "mine:5", (5, 2), "f32")
    e = [replace(evidence(DRAWN, secret=False), costs=Costs(0, 0, 0, (reduces, sends), {}))]
    verdicts = [times_sent("times", e, "all_reduce", lambda _, n=n: n, "", fewer=True) for n in (1, 2, 3)]
    assert [fact.passed for fact in verdicts] == [False, True, True] and "expected at most 1" in verdicts[0].message
    assert not times_sent("times", e, "all_reduce", lambda _: 3, "").passed
    assert only_collectives("others", e, ("all_reduce",), over=lambda _: "data").passed
    for allowed, axis in ((("all_reduce",), "node"), ((), "data")):
        assert not only_collectives("others", e, allowed, over=lambda _, axis=axis: axis).passed


NOTHING = Evidence(Case("data=8", {"data": 8}, Sizes()), (), (), {}, {}, Costs(0, 0, 0, (), {}), Memory(0, 0, 0, 0, ()))
VACUOUS = {
    "arrays of no case": lambda: arrays_match("values", [], "values"),
    "arrays of no leaf": lambda: arrays_match("values", [NOTHING], "values"),
    "arrays of no element": lambda: arrays_match("values", [empty()], "values"),
    "norm of no case": lambda: global_norm_matches([], "gradients"),
    "norm of no leaf": lambda: global_norm_matches([NOTHING], "gradients"),
    "bytes of no case": lambda: bytes_sent("bytes", [], "all_gather", lambda _: 0),
    "times of no case": lambda: times_sent("times", [], "all_gather", lambda _: 0, ""),
    "most bytes of no case": lambda: bytes_at_most("bytes", [], ("all_gather",), lambda _: 1, ""),
    "collectives of no case": lambda: only_collectives("others", [], ()),
    "products of no case": lambda: products_of("products", [], "bf16", ""),
    "no product": lambda: products_of("products", [NOTHING], "bf16", ""),
    "no function or sum": lambda: precise_in("functions", [NOTHING], "f32", ""),
    "state of no case": lambda: state_bytes([], lambda _: 0, lambda _: 0),
    "no state": lambda: state_bytes([NOTHING], lambda _: 0, lambda _: 0),
    "no facts": lambda: worst([]),
}


def empty():
    none = np.zeros((0, 3), np.float32)
    return replace(NOTHING, measured={"values/none": none}, expected={"values/none": none})


@pytest.mark.parametrize("what", VACUOUS)
def test_a_fact_over_nothing_fails(what):
    fact = VACUOUS[what]()
    assert fact.passed is False and fact.message


def test_gradients_that_are_wrong_or_not_there_leave_no_points_to_any_other_fact():
    good = arrays_match("values", [evidence(DRAWN, secret=True, name="values/x")], "values")
    for bad in (
        arrays_match("gradients", [evidence(1.01 * DRAWN, secret=True)], "gradients"),
        arrays_match("gradients", [NOTHING], "gradients"),
        arrays_match("gradients", [evidence(DRAWN + np.float32(np.nan), secret=True)], "gradients"),
        global_norm_matches([evidence(1.01 * DRAWN, secret=True)], "gradients"),
        global_norm_matches([evidence(DRAWN + np.float32(np.nan), secret=True)], "gradients"),
        global_norm_matches([NOTHING], "gradients"),
    ):
        assert (good.passed, bad.passed, bad.kind) == (True, False, Kind.GRADIENTS)
        assert conclude("f", 4, [good, bad]).points == 0
        assert conclude("f", 4, [good, bad]).reason == "Wrong gradients earn nothing, whatever else is met."


@pytest.mark.parametrize(
    ("bubble", "bytes_", "points"),
    [(True, True, 8), (True, False, 7), (False, True, 4), (False, False, 4), (None, True, 8)],
)
def test_an_answer_that_misses_its_point_keeps_at_most_half(bubble, bytes_, points):
    facts = [
        Fact("values", Kind.VALUES, True, weight=6),
        Fact("bubble", Kind.TIME, bubble, point=True),
        Fact("bytes", Kind.COMMUNICATION, bytes_),
    ]
    found = conclude("f", 8, facts)
    assert (found.points, "“bubble”" in found.reason) == (points, bubble is False)


@pytest.mark.parametrize(
    ("few", "many", "said"),
    [
        (({"dot_general": 2, "add": 5}, 4), ({"dot_general": 2, "add": 5}, 16), ""),
        (({"dot_general": 2, "add": 15}, 4), ({"dot_general": 8, "add": 9}, 16), "more of dot-general: it grows with"),
        (({"dot_general": 8, "add": 5}, 16), ({"dot_general": 8, "add": 5}, 16), "it does as much in both"),
        (({"dot_general": 2}, 4), ({"dot_general": 2, "slice": 1}, 16), "more of slice"),
    ],
)
def test_program_that_is_padded_where_less_is_asked_for_still_grows(few, many, said):
    def having(written, products):
        costs = Costs(0, 0, 0, (), {"f32 x f32": products}, sum(written.values()), written=written)
        return replace(evidence(DRAWN, secret=False), costs=costs)

    fact = same_program_size("program size", having(*few), having(*many), "depth", "Look here.")
    assert (fact.passed, said in fact.message) == (not said, True)

"""Messages of facts about wrong numbers: all values if inputs are public, none if they are secret."""

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from autograder.contract.byte_facts import (
    bytes_at_most,
    bytes_sent,
    only_collectives,
    state_bytes,
    times_sent,
)
from autograder.contract.case import UNSEEN, ModelSizes, Sizes
from autograder.contract.facts import (
    BEFORE,
    FIRST_LOSS,
    FOLLOW,
    LOSS_ALONE,
    arrays_match,
    global_norm_matches,
    parts_match,
    precise_in,
    products_of,
    same_program_size,
    values_and_gradients,
    worst,
)
from autograder.contract.sentence import About
from autograder.contract.task import Case, Evidence
from autograder.contract.verdict import Fact, Kind, conclude
from course.program import Costs, Leaf, Memory

DRAWN = np.random.default_rng(5).standard_normal((4, 8)).astype(np.float32)
ONE_WRONG = DRAWN + np.eye(4, 8, 3, dtype=np.float32) * np.float32(0.5) * (np.arange(4) == 2)[:, None]


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


def gradient_facts(measured, secret):
    e = [evidence(measured, secret=secret)]
    return arrays_match("gradients", e, "gradients"), global_norm_matches(e, "gradients")


@pytest.mark.parametrize("measured", [8 * DRAWN, DRAWN / 8, ONE_WRONG, -DRAWN, 0 * DRAWN, DRAWN + 100])
def test_secret_inputs_are_judged_alike_and_no_value_is_shown(measured):
    norms = [float(np.linalg.norm(a)) for a in (measured, DRAWN)]
    values = [f"{abs(float(v)):.4g}" for v in (*measured.flat, *DRAWN.flat, *norms) if abs(v) > 1e-6 and v % 1]
    for public, secret in zip(gradient_facts(measured, False), gradient_facts(measured, True), strict=True):
        assert (public.passed, public.line, public.case) == (secret.passed, secret.line, secret.case)
        excerpt = f"{secret.measured_text} {secret.limit_text} {secret.message}"
        assert [value for value in values if len(value) > 4 and value in excerpt] == []
        if public.passed is False:
            assert any(value in f"{public.measured_text} {public.message}" for value in values), (
                "the public one says it"
            )


def test_a_secret_message_says_where_how_many_how_far_and_which_factor():
    wrong, norm = gradient_facts(8 * DRAWN, True)
    at = list(map(int, np.unravel_index(np.argmax(np.abs(DRAWN)), DRAWN.shape)))
    assert wrong.message.startswith(
        f"leaf layers/up in the case 'data=8': 32 of 32 elements are wrong, the worst at {at}"
    )
    assert "by 7 times the largest expected one" in wrong.message
    assert "8 times too large, and axis 'data' has that size" in wrong.message
    assert "norm over all leaves, each counted once, is 8 times what it should be" in norm.message
    (single, _) = gradient_facts(ONE_WRONG, True)
    assert re.search(r"1 of 32 elements is wrong, the worst at \[2, 5\] by 0\.\d+ times", single.message)


def test_where_inputs_are_public_both_values_are_shown():
    wrong, norm = gradient_facts(8 * DRAWN, False)
    assert re.search(r"measured -?[\d.]+, expected -?[\d.]+ at \[\d, \d\]", wrong.message)
    assert re.search(r"the norm over all leaves, each counted once, is [\d.]+ and should be [\d.]+", norm.message)


def test_a_tolerance_may_be_stated_and_none_means_to_the_last_bit():
    off = evidence(DRAWN * np.float32(1.001), secret=False)
    assert [arrays_match("gradients", [off], "gradients", tolerance=t).passed for t in (1e-2, 2e-5)] == [True, False]
    same = evidence(DRAWN.copy(), secret=False)
    assert arrays_match("gradients", [same], "gradients", tolerance=0).passed is True
    last = evidence(np.nextafter(DRAWN, 9, dtype=np.float32), secret=False)
    assert arrays_match("gradients", [last], "gradients", tolerance=0).passed is False


def test_functions_and_sums_in_another_dtype_are_named():
    e = replace(evidence(DRAWN, secret=True), costs=Costs(0, 0, 0, (), {}, 0, {"log of f32": 2, "sum of bf16": 3}))
    fact = precise_in("functions", [e], "f32", "Look here.")
    assert (fact.passed, fact.measured_text, fact.limit_text, fact.unit_text) == (False, "2 of 5", "5 of 5", "of f32")
    assert fact.message == "besides 2 of f32 there are: sum of bf16 (3). Look here."
    assert fact.line == "mine:3", "nobody knows where"
    known = replace(e, costs=replace(e.costs, lines={"log of f32": "mine:8", "sum of bf16": "mine:9"}))
    assert precise_in("functions", [known], "f32", "").line == "mine:9"
    only = replace(e, costs=Costs(0, 0, 0, (), {}, 0, {"log of f32": 2}))
    assert precise_in("functions", [only], "f32", "").passed is True


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


@pytest.mark.parametrize("description", VACUOUS)
def test_a_fact_over_nothing_fails(description):
    fact = VACUOUS[description]()
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
        assert conclude("f", 4, [good, bad]).reason == "No points for wrong gradients, whatever other limits are met."


@pytest.mark.parametrize(
    ("bubble", "bytes_", "points"),
    [(True, True, 8), (True, False, 7), (False, True, 4), (False, False, 4), (None, True, 8)],
)
def test_an_answer_that_misses_its_point_keeps_at_most_half(bubble, bytes_, points):
    facts = [
        Fact("values", Kind.VALUES, True, weight=6),
        Fact("bubble", Kind.TIME, bubble, core=True),
        Fact("bytes", Kind.COMMUNICATION, bytes_),
    ]
    result = conclude("f", 8, facts)
    assert (result.points, "“bubble”" in result.reason) == (points, bubble is False)


def test_numbers_that_differ_in_their_last_digits_are_written_with_them():
    e = evidence(np.nextafter(DRAWN, 9, dtype=np.float32), secret=False)
    excerpt = arrays_match("gradients", [e], "gradients", tolerance=0).message
    measured, expected = re.findall(r"(?:measured|expected) (-?[\d.]+)", excerpt)
    assert measured != expected


@pytest.mark.parametrize(
    ("few", "many", "excerpt"),
    [
        (({"dot_general": 2, "add": 5}, 4), ({"dot_general": 2, "add": 5}, 16), ""),
        (({"dot_general": 2, "add": 15}, 4), ({"dot_general": 8, "add": 9}, 16), "more `matmul` operations: it grows"),
        (({"dot_general": 8, "add": 5}, 16), ({"dot_general": 8, "add": 5}, 16), "it does the same amount in both"),
        (({"dot_general": 2}, 4), ({"dot_general": 2, "slice": 1}, 16), "more `slice` operations"),
    ],
)
def test_a_program_that_is_padded_in_the_smaller_case_still_grows(few, many, excerpt):
    def having(written, products):
        costs = Costs(0, 0, 0, (), {"f32 x f32": products}, sum(written.values()), written=written)
        return replace(evidence(DRAWN, secret=False), costs=costs)

    fact = same_program_size("program size", having(*few), having(*many), "depth", "Look here.")
    assert (fact.passed, excerpt in fact.message) == (not excerpt, True)


def test_facts_that_may_have_one_cause_are_reported_together_with_the_first_to_examine():
    def fact(name, kind, measured=1.0, limit: Any = 0.0, message="no", case="data=8"):
        return Fact(name, kind, False, measured, limit, message=message, case=case)

    def together(*facts):
        return conclude("f", 4, list(facts)).together

    values, back = fact("values", Kind.VALUES), fact("gradients", Kind.GRADIENTS)
    few, many = (fact("bytes", Kind.COMMUNICATION, sent, (8, 9)) for sent in (3, 12))
    other = fact("other collectives", Kind.COMMUNICATION, 1, 0)
    assert together(values) == ""
    assert together(values, back) == "“values” and “gradients” may have the same cause: begin with “values”."
    assert together(replace(values, about=(About.LATER_LOSSES,)), back).endswith("begin with “gradients”.")
    assert together(values, back, few).startswith(
        "“values”, “gradients” and “bytes” may have the same cause: less is sent"
    )
    assert "more is sent" in together(values, many, other) and "sent" not in together(values, few, other)
    assert "sent" not in together(values, back, replace(few, case="data=2"))
    assert together(few, other) == ""


@dataclass(frozen=True)
class Large(Sizes):
    large: bool = True


@dataclass(frozen=True)
class Steps(Sizes):
    steps: int = 2


LOSSES = np.array([3, 2], np.float32)


@pytest.mark.parametrize(
    ("losses", "factor", "says"), [([4, 2], 2, FIRST_LOSS), ([3, 2.5], 2, FOLLOW), ([4, 2.5], 1, LOSS_ALONE)]
)
def test_a_step_is_sent_to_the_loss_if_that_is_wrong_before_any_update(losses, factor, says):
    e = evidence(factor * DRAWN, secret=False)
    e = replace(e, case=replace(e.case, sizes=Steps()))
    measured = {**e.measured, "values/loss": np.array(losses, np.float32)}
    e = replace(e, measured=measured, expected={**e.expected, "values/loss": LOSSES})
    assert values_and_gradients([e], step=True)[0].message.endswith(says)


def test_of_several_parts_the_first_that_is_wrong_asks_its_own_question():
    names = ("values/norm", "values/state")
    e = replace(evidence(ONE_WRONG, secret=False), expected=dict.fromkeys(names, DRAWN))
    for wrong in names:
        measured = {name: ONE_WRONG if name == wrong else DRAWN for name in names}
        fact = parts_match("values", [replace(e, measured=measured)], {name: f"about {name}?" for name in names})
        assert not fact.passed and f"about {wrong}?" in fact.message
    assert parts_match("values", [replace(e, measured=dict(e.expected))], dict.fromkeys(names, "")).passed


def test_a_partial_answer_says_what_each_missed_fact_costs_and_that_adds_up():
    facts = [
        Fact("values", Kind.VALUES, True, weight=6),
        Fact("bubble", Kind.TIME, False, core=True),
        Fact("bytes", Kind.COMMUNICATION, False, weight=2),
    ]
    expected = "“bubble” costs 2.22 and “bytes” costs 1.78 of 8 points: 4 left."
    assert conclude("f", 8, facts).reason.endswith(expected)
    assert conclude("f", 2, [facts[0], facts[2]]).reason == "“bytes” costs 0.5 of 2 points: 1.5 left."
    assert conclude("f", 1, [facts[0], facts[2]]).reason.startswith("“bytes” costs 0.25 of 1 point:")
    assert conclude("f", 2, [facts[0]]).reason == ""


def test_a_message_of_several_facts_is_given_once_and_by_one_that_costs_points():
    def messages(*weights):
        facts = [Fact(f"of {w}", Kind.MEMORY, False, weight=w, message="it changes with its sizes") for w in weights]
        return [fact.message for fact in conclude("f", 2, facts).facts]

    assert messages(2, 1) == ["it changes with its sizes", "the same as for “of 2”"]
    assert messages(0, 1) == ["the same as for “of 1”", "it changes with its sizes"]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("data=2 x tensor=4", "on mesh data=2 x tensor=4"),
        ("data=2 x tensor=4, 32 microbatches", "in the case 'data=2 x tensor=4, 32 microbatches'"),
        (UNSEEN, "on mesh data=2 x tensor=4 (width 6, hidden 9)"),
    ],
)
def test_a_case_is_named_by_its_mesh_and_by_what_else_tells_it_from_others(name, place):
    sizes = ModelSizes(width=6, hidden=9, num_heads=0, parallel=True)
    assert Case(name, {"data": 2, "tensor": 4}, sizes).place == place


@pytest.mark.parametrize(("note", "name"), [((), "tensor=4 x data=2"), (("wide",), "tensor=4 x data=2, wide")])
def test_a_case_takes_its_name_from_its_mesh(note, name):
    case = Case.on({"tensor": 4, "data": 2}, Sizes(), *note, quick=True)
    assert case == Case(name, {"tensor": 4, "data": 2}, Sizes(), quick=True)


@pytest.mark.parametrize(
    ("spacings", "rate", "right"), [(0, 1.0, True), (1, 1.0, True), (1, 4.0, True), (2, 1.0, False)]
)
def test_a_gradient_read_off_an_update_may_differ_as_float32_rounds_the_parameter(spacings, rate, right):
    """The gradient is so small next to its parameter that one spacing of the parameter is more than the tolerance."""
    before, spacing = np.full((4, 8), 1.5, np.float32), np.spacing(np.float32(1.5))
    after = before - 256 * spacing
    read = (before - (after - spacings * spacing)) / np.float32(rate)
    judged = replace(
        evidence(read, secret=False),
        expected={"gradients/up": (before - after) / np.float32(rate), "values/params/up": after},
        measured={"gradients/up": read},
        drawn={"learning_rate": np.float32(rate)},
    )
    assert arrays_match("gradients", [judged], "gradients").passed is right
    unknown = replace(judged, drawn={})
    assert arrays_match("gradients", [unknown], "gradients").passed is (spacings == 0)


@pytest.mark.parametrize(("share", "right"), [(0, True), (1e-6, True), (1e-3, False)])
def test_a_gradient_that_is_zero_may_be_off_as_terms_that_cancel_are_rounded(share, right):
    """There is no largest element to compare with, so the norm of all gradients takes its place."""
    norm = np.sqrt(np.sum(np.square(DRAWN)))
    zero = {"gradients/bias": np.zeros(8, np.float32)}
    off = {"gradients/bias": np.full(8, share * norm, np.float32)}
    e = evidence(DRAWN, secret=False)
    judged = replace(e, expected=e.expected | zero, measured=e.measured | off)
    fact = arrays_match("gradients", [judged], "gradients")
    assert fact.passed is right and (right or "expected 0" in fact.message)
    alone = replace(judged, expected=zero, measured=off)
    assert arrays_match("gradients", [alone], "gradients").passed is (share == 0)


def test_a_message_about_infinite_values_asks_about_exponentials_if_inputs_are_large():
    e = evidence(np.full_like(DRAWN, np.inf), secret=False)
    assert "exp" not in arrays_match("values", [e], "gradients").message
    large = replace(e, case=replace(e.case, sizes=Large()))
    assert "what is subtracted before an exponential?" in arrays_match("values", [large], "gradients").message


def state_leaf(name, shape, spec):
    return Leaf(name, shape, "float32", spec, "state")


def test_a_wrong_shape_is_that_of_each_device_which_the_learner_sees():
    """A state that is whole on each of 8 devices, although each should have one row of eight."""
    whole = np.zeros((64, 8), np.float32)
    e = replace(
        evidence(whole, secret=False, name="values/m"),
        expected={"values/m": whole[:8]},
        outputs=(state_leaf("values/m", (64, 8), (("data",), ())),),
    )
    fact = arrays_match("values", [e], "values")
    assert "measured float32[8, 8] on each device, expected float32[1, 8]." in fact.message
    # Several devices' results in one array: the first dim is not the function's.
    copies = np.zeros((8, 4, 4), np.float32)
    outputs = (state_leaf("values/m", copies.shape, (("data",), (), ())),)
    stacked = replace(e, measured={"values/m": copies}, expected={"values/m": copies[:, :, :1]}, outputs=outputs)
    message = arrays_match("values", [stacked], "values").message
    assert "measured float32[4, 4] on each device, expected float32[4, 1]: broadcasting gave it [4, 4]" in message


def test_a_leaf_that_all_devices_have_counts_once_in_the_norm():
    parts, whole = np.full((8, 2), 3.0, np.float32), np.full((2,), 4.0, np.float32)
    copies = np.tile(whole, (8, 1))
    inputs = (state_leaf("params/split", (8, 2), (("data",), ())), state_leaf("params/whole", (2,), ((),)))
    leaves = {"gradients/split": parts, "gradients/whole": copies}
    e = replace(evidence(parts, secret=False), inputs=inputs, measured=leaves, expected=leaves)
    assert global_norm_matches([e], "gradients").measured == pytest.approx(np.sqrt(16 * 9 + 2 * 16))
    empty = {"gradients/whole": np.zeros((8, 0), np.float32)}
    assert global_norm_matches([replace(e, measured=leaves | empty, expected=leaves | empty)], "gradients").passed


def test_a_message_says_that_results_in_the_wrong_order_have_each_others_values():
    names = ("values/params", "values/loss", "values/norm", "gradients/params")
    right = dict(zip(names, (DRAWN, np.float32(2.5), np.float32(3.5), DRAWN), strict=True))
    wrong = right | {"values/loss": right["values/norm"], "values/norm": right["values/loss"]}
    e = replace(evidence(DRAWN, secret=False), expected=right, measured=wrong | {"gradients/params": DRAWN / 2})
    values, back, _ = values_and_gradients([e], "Why?", "Whose?", step=True)
    assert "`loss` and `norm` have each other's values: in which order are they returned?" in values.message
    assert back.message == BEFORE and "Why?" not in values.message


COMMON = {
    "split": (("embed/up", "layers/up", "head/up"), "These are exactly the leaves that are split over devices"),
    "layers": (("layers/up", "layers/down"), "They are exactly those under `layers`."),
    "all but the layers": (("head/up", "head/down"), "They are exactly those under `head`."),
    "all but one part": (("layers/up", "layers/down", "embed/up", "embed/down"), "Only those under `head` are right."),
    "nothing": (("layers/up", "head/down"), "layers/up"),
}


@pytest.mark.parametrize("description", COMMON)
def test_wrong_leaves_are_distinguished_from_right_ones_by_what_they_have_in_common(description):
    wrong, says = COMMON[description]
    names = [f"{part}/{name}" for part in ("embed", "layers", "head") for name in ("up", "down")]
    inputs = tuple(state_leaf(f"params/{name}", (4, 8), (("data",) * name.endswith("up"), ())) for name in names)
    expected = {f"gradients/{name}": DRAWN for name in names}
    measured = {f"gradients/{name}": DRAWN + (ONE_WRONG - DRAWN) * (name in wrong) for name in names}
    e = replace(evidence(DRAWN, secret=False), inputs=inputs, expected=expected, measured=measured)
    message = arrays_match("gradients", [e], "gradients").message
    assert f"{len(wrong)} of 6 leaves are wrong here" in message and says in message
    assert ("exactly" in message or "Only" in message) is (description != "nothing")

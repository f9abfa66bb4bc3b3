"""An invalid answer is wrong whatever the right answer is, and is judged like any other."""

import json
import random
import re

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autograder.contract import value_tasks as answers
from autograder.contract.case import Sizes
from autograder.contract.task import Case, Evidence
from autograder.contract.value_facts import LARGEST, answer_matches, decode, every_answer_matches, is_answer
from autograder.contract.verdict import Kind
from autograder.contract.wrapping import Mismatch
from course.program import Costs, Memory

CASE = Case("data=8", {"data": 8}, Sizes())
NO_ANSWERS = [
    "NaN",
    "-Infinity",
    "1e400",
    "9" * 300,
    str(-2 * LARGEST),
    "[1,NaN]",
    "{}",
    '{"spec":3}',
    "[" * 500,
    "",
    "nul",
    "\xff",
]


def raw(text):
    return np.frombuffer(
        text.encode("latin-1")[: answers.MAX_ANSWER_BYTES].ljust(answers.MAX_ANSWER_BYTES, b"\0"), np.uint8
    )


def evidence(measured, right):
    values = ({"values": measured}, {"values": answers.encode(right)})
    return [Evidence(CASE, (), (), *values, Costs(0, 0, 0, (), {}), Memory(0, 0, 0, 0, ()))]


@pytest.mark.parametrize("text", NO_ANSWERS)
@pytest.mark.parametrize("right", [None, 3, (), (None, None), ("psum", "data")])
def test_what_is_no_answer_is_wrong_even_where_none_is_right(text, right):
    assert decode(raw(text)) is None and not is_answer(raw(text))
    single = answer_matches(evidence(raw(text), right), lambda *_: "")
    questions = right if isinstance(right, tuple) else (right,)
    several = every_answer_matches(
        evidence(raw(text), right), lambda _: questions, lambda _, question, answer: answer == question, lambda *_: ""
    )
    assert [(fact.passed, fact.kind) for fact in (single, several)] == [(False, Kind.VALUES)] * 2


@pytest.mark.parametrize("right", [None, 3, -(2**40), 0.5, "data", (), (1, (2, None))])
def test_a_right_answer_is_decoded_unchanged(right):
    assert is_answer(answers.encode(right)) and decode(answers.encode(right)) == right
    assert answer_matches(evidence(answers.encode(right), right), lambda *_: "").passed


def test_no_question_is_not_all_questions_answered():
    fact = every_answer_matches(evidence(answers.encode(()), ()), lambda _: (), lambda *_: True, lambda *_: "")
    assert fact.passed is False and fact.message
    assert every_answer_matches([], lambda _: (1,), lambda *_: True, lambda *_: "").passed is False


def test_answers_are_json_of_bounded_length():
    assert json.loads(answers.encode((1, "a")).tobytes().rstrip(b"\0")) == [1, "a"]
    with pytest.raises(answers.Mismatch, match="are expected"):
        answers.encode("x" * answers.MAX_ANSWER_BYTES)


def test_ranges_in_an_answer_are_the_numbers_that_they_stand_for():
    assert answers._formed("layers", (range(2), [3], range(4, 4)), None) == ((0, 1), (3,), ())


@pytest.mark.parametrize("like", [None, ((0, 0),)])
def test_numpy_arrays_and_numbers_are_the_plain_values_that_they_stand_for(like):
    for pairs in (np.arange(4).reshape(2, 2), [(np.int64(0), np.uint8(1)), np.array([2, 3])]):
        formed = answers._formed("pairs", pairs, like)
        assert formed == ((0, 1), (2, 3)) and {type(n) for pair in formed for n in pair} == {int}
    assert answers._formed("schedule", np.array(["F0", "B0"]), None) == ("F0", "B0")


@pytest.mark.parametrize(
    ("answer", "like", "says"),
    [
        ((i for i in range(2)), None, "a generator (return a tuple of what it yields)"),
        (P(b"data"), P("x"), "b'data' is not the name of a mesh axis"),
        (P(("data", 1)), P("x"), "1 is not the name of a mesh axis"),
        (np.arange(2.0), (0, 0), "a float, expected a value of type int"),
    ],
)
def test_other_values_are_described(answer, like, says):
    with pytest.raises(Mismatch, match=re.escape(says)):
        answers._formed("schedule", answer, like)


def asserted(count):
    assert count, "none"


def raising(count):
    if not count:
        raise KeyError("none")


def dividing(count):
    return 1 // count


def raised_by_a_library(count):
    return random.choice(range(count))


@pytest.mark.parametrize(
    ("function", "meant"),
    [(asserted, True), (raising, True), (dividing, False), (raised_by_a_library, False)],
)
def test_only_an_error_that_the_function_itself_raises_gets_a_note_about_refusals(function, meant):
    with pytest.raises(Exception) as raised:
        answers.answer_or_refusal(function, 0)
    assert not isinstance(raised.value, ValueError)
    (note,) = raised.value.__notes__
    assert note.startswith(f"{function.__name__}(0)") and ("only ValueError counts" in note) is meant

"""Messages about typical mistakes are true, point to the mistake, and contain nothing internal to the grader."""

import os

import pytest

from autograder.proof.mistakes import check_message
from autograder.proof.mistakes.table import MISTAKES

# The short form has one of each kind of message.
IN_SHORT = {
    "colon left out",
    "name misspelt",
    "traced value as a list's index",
    "axis name hard-coded",
    "pair past the last device",
    "a function that it calls is wrong",
    "a function that it calls is a stub",
    "negative scatter_dimension",
    "tiled left out",
    "way back with the axes of the way there",
    "microbatch's number without the stage",
    "repeats as long as there are microbatches",
}
CHOSEN = [mistake for mistake in MISTAKES if os.environ.get("MESHCRAFT_FULL") or mistake.name in IN_SHORT]


@pytest.mark.parametrize("mistake", CHOSEN, ids=lambda mistake: f"{mistake.function}: {mistake.name}")
def test_the_message_is_true_quotes_the_line_and_says_where_to_look(mistake):
    assessment = check_message(mistake)
    assert assessment.verdict == "true", f"{assessment.why}\n{assessment.text}"


def test_there_are_many_mistakes_of_all_kinds_and_each_is_named_once():
    named = [(mistake.function, mistake.name) for mistake in MISTAKES]
    assert len(named) >= 60 and len(set(named)) == len(named)
    assert len({mistake.chapter for mistake in MISTAKES}) >= 8 and {mistake.name for mistake in MISTAKES} >= IN_SHORT

"""The recorded table of public programs: complete, with the errors stated on the page."""

import re

import pytest

from course.validation.corpus.programs import ENTRIES
from course.validation.corpus.record import recorded

ROWS = recorded()


def test_every_program_is_in_the_table_at_its_commit():
    assert [(row.name, row.commit, row.path) for row in ROWS] == [(e.name, e.commit, e.path) for e in ENTRIES]
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES) >= 20
    assert len({entry.repository for entry in ENTRIES}) >= 10


def test_what_is_refused_is_refused_with_a_sentence_and_a_line():
    for row in ROWS:
        assert row.accepted or re.match(r"[\w.\-/]+\.(py|md):\d+: ", row.refused), row.refused
        assert "Traceback" not in row.refused and "FAILED" not in row.refused


@pytest.mark.parametrize("row", [row for row in ROWS if row.accepted], ids=lambda row: row.name)
def test_flops_are_those_of_xlas_own_analysis(row):
    assert abs(row.flops_error) < 0.01

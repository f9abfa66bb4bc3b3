"""The puzzles' pictures show the blocks of each device, and never the spec."""

import pytest

from course.puzzles import PANELS, picture


@pytest.mark.parametrize("name", PANELS)
def test_a_picture_shows_all_devices_and_not_its_spec(name):
    drawn, printed = picture(name)._repr_html_(), repr(picture(name, ("pipe", "expert")))
    assert drawn.count("<svg") == len(PANELS[name])
    assert "P(" not in drawn and "P(" not in printed
    assert "pipe" in printed and "data" not in printed
    assert printed.count("\n7 ") == len(PANELS[name])


def test_summands_are_not_called_copies():
    before, after = picture("add").panels
    assert "summands" in repr(before) and "held" not in repr(before).splitlines()[-1]
    assert "held once" in repr(after)


def test_an_unknown_picture_is_refused_with_the_existing_ones():
    with pytest.raises(LookupError, match="there are: rows, crossed"):
        picture("columns")

"""Generated parts of a page are replaced, and nothing else is."""

import pytest

from course.render.page_parts import generated, write_parts

MARKED = "<!-- {0}: generated -->\n{{}}\n<!-- end of {0} -->\n"
PAGE = f"above\n{MARKED.format('one')}between\n{MARKED.format('two')}"


def test_parts_are_read_and_written_by_name_and_the_rest_stays(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE.format("\n1\n", "\n2\n"))
    assert [generated(page, name) for name in ("one", "two")] == ["1", "2"]
    write_parts(page, {"two": "| 3 |"})
    assert page.read_text() == PAGE.format("\n1\n", "\n| 3 |\n")
    write_parts(page, {name: generated(page, name) for name in ("one", "two")})
    assert page.read_text() == PAGE.format("\n1\n", "\n| 3 |\n")


def test_a_part_that_the_page_lacks_is_named(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    with pytest.raises(ValueError, match="no generated part 'one'"):
        write_parts(page, {"one": ""})

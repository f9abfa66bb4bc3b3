"""What the guide for contributors names is there."""

import re
from pathlib import Path

import pytest

from autograder.contract import answer_facts, answers, draws, facts, forms, limits
from course.curriculum import CHAPTERS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "site" / "pages" / "contributing.md").read_text()


@pytest.mark.parametrize("chapter", [entry.name for entry in CHAPTERS])
def test_every_file_of_a_chapter_is_where_the_guide_says(chapter):
    named = set(
        re.findall(r"`((?:course|solutions|exercises|autograder|site)/[\w/]*\.(?:py|ipynb|json|md|yml))`", PAGE)
    )
    assert len(named) > 12
    missing = {path for path in named if not (ROOT / path.replace("CHAPTER", chapter)).is_file()}
    assert missing <= {"site/examples/NAME.py"}


def test_every_function_that_the_guide_names_exists():
    listed = {
        facts: set(
            re.findall(r"^\| (`.*?`) \|", PAGE.split("| in `autograder.contract.facts`")[1].split("\n\n")[0], re.M)
        )
    }
    listed[limits] = set(
        re.findall(r"^\| (`.*?`) \|", PAGE.split("| in `autograder.contract.limits`")[1].split("\n\n")[0], re.M)
    )
    for module, rows in listed.items():
        names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
        assert len(names) > 4 and all(callable(getattr(module, name, None)) for name in names), module
    for module in (answers, answer_facts):
        for name in re.findall(rf"`{module.__name__.rpartition('.')[2]}\.(\w+)`", PAGE):
            assert callable(getattr(module, name)), name
    assert draws.meshes and forms.same_tree and facts.worst


def test_commands_that_the_guide_types_are_the_makefiles():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"(?:`|^)make ([\w-]+)", PAGE, re.M))
    assert len(named) >= 6 and named <= targets

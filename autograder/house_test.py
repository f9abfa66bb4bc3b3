"""The house itself: who may import whom, one word for everything, and what must not be in the repository."""

import ast
import re

import pytest

from autograder.contract import JUDGED_BY
from autograder.notebook import ROOT
from course.curriculum import CHAPTERS, NOTEBOOKS, PRIMER, earlier

OURS = ("course", "solutions", "autograder")
SOURCES = [
    path
    for folder in OURS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "submitted" not in path.parts and not path.name.endswith("_test.py") and "probes" not in path.parts
]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            bare = node.module in OURS
            yield from (f"{node.module}.{alias.name}" for alias in node.names) if bare else [node.module]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


# What the sandbox has of the autograder beside its own end of the pipe: it wraps a task and knows no answer.
WRAPS = {f"autograder.{name}" for name in ("wrapping", "forms", "cases", "answers")}
WRAPPINGS = {f"autograder.chapters.{entry.name}.wrapping" for entry in CHAPTERS}


def allowed(path):
    """What of ours a file may import, packages with all that is in them."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "course":
        return {"course"}
    if parts[0] == "solutions":
        before = earlier(parts[1]) if parts[1] not in ("__init__", PRIMER.name) else ()
        return {"course", *(f"solutions.{entry.name}" for entry in before)}
    if ".".join(parts) in WRAPS:
        return {"course", *WRAPS}
    if parts[:2] == ("autograder", "chapters") and parts[3:4] == ("wrapping",):
        return {"course", *WRAPS, *WRAPPINGS}
    if parts[:2] == ("autograder", "chapters") or parts[1] in JUDGED_BY:
        own = {".".join(parts[:3])} if parts[1] == "chapters" else set()
        return {"course", *own, *(f"autograder.{name}" for name in JUDGED_BY)}
    return set(OURS)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path):
    ours = {name for name in imports(path) if name.split(".")[0] in OURS}
    fine = allowed(path)
    up = {name for name in ours if not any(f"{name}.".startswith(f"{good}.") for good in fine)}
    assert not up, f"{path.name} may import {sorted(fine)} and imports {sorted(up)}"


@pytest.mark.parametrize("chapter", [entry.name for entry in CHAPTERS])
def test_one_word_finds_everything(chapter):
    for place in (
        f"solutions/{chapter}.py",
        f"exercises/{chapter}/{chapter}.ipynb",
        f"autograder/chapters/{chapter}/__init__.py",
        f"autograder/mutants/{chapter}/__init__.py",
        f"autograder/variants/{chapter}/__init__.py",
        f"autograder/hints/{chapter}.md",
        f"autograder/references/{chapter}.json",
        f"site/pages/{chapter}.md",
        f"site/pages/profiling/{chapter}.md",
    ):
        assert (ROOT / place).is_file(), place


def test_the_primer_is_a_page_and_a_notebook_and_no_chapter():
    for place in ("solutions/primer.py", "exercises/primer/primer.ipynb", "site/pages/primer.md"):
        assert (ROOT / place).is_file(), place
    assert PRIMER not in CHAPTERS and not (ROOT / "autograder" / "chapters" / PRIMER.name).exists()


def test_every_exercise_is_a_notebook_of_the_curriculum():
    assert sorted(p.name for p in (ROOT / "exercises").iterdir()) == sorted(entry.name for entry in NOTEBOOKS)


def test_constraints_pin_everything_that_is_installed_and_name_no_host():
    text = (ROOT / "constraints.txt").read_text()
    assert not re.search(r"https?:|--|file:", text)
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r'[\w.\-]+==[\w.+!]+(; python_version (<|>=) "3\.12")?', line) for line in lines)


def test_nothing_lies_where_it_would_break_something():
    assert not list((ROOT / "site").rglob("__init__.py"))
    assert not list((ROOT / "exercises").rglob("*.py"))
    assert not list(ROOT.glob("uv.lock"))


def test_public_functions_of_the_course_say_what_they_do():
    for path in SOURCES:
        if path.parts[len(ROOT.parts)] != "course":
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path.name}: {node.name} has no docstring"

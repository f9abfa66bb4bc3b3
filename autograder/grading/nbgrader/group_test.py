"""Assistants with accounts of their own: they review and export, and never see the secret."""

import grp
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from autograder.grading.nbgrader import people
from autograder.grading.nbgrader.batch_test import fake, grade
from autograder.grading.nbgrader.conftest import WHERE, change, exported, hand_in
from autograder.grading.nbgrader.course import open_gradebook, secret
from autograder.grading.nbgrader.group import require_group
from autograder.grading.nbgrader.settings import CourseError
from course.curriculum import ROOT

__all__ = ["fake"]  # a fixture


def act_as_assistant(term: str) -> None:
    """Do what an assistant can do in a shared course, and try what they cannot; permanently become another user."""
    shared = Path(term)
    exported(shared)  # triggers the late imports
    os.setgroups([65534])
    os.setgid(1000)
    os.setuid(1000)
    with open_gradebook(shared) as gradebook:
        grade_row: Any = gradebook.find_grade("question", *WHERE, "ada")
        grade_row.manual_score, grade_row.needs_manual_grade = 1.5, False
        gradebook.db.commit()
    assert exported(shared)["ada"]["score"] == "19.5"
    people.extend(shared, "fsdp", ["ada"], 24)
    with pytest.raises(CourseError, match=r"secret can be read only by root, who grades"):
        secret(shared)
    with pytest.raises(CourseError, match="only root grades and changes this course"):
        grade(shared)
    with pytest.raises(PermissionError):
        (shared / ".meshcraft" / "secret").unlink()


@pytest.mark.long
@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as a second user")
def test_an_assistant_of_the_group_reviews_and_exports_and_never_sees_the_secret(term):
    group = grp.getgrgid(65534).gr_name
    hand_in(term, "ada", answer="x")
    grade(term)
    change(term, group=group)
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        shared = Path(place) / "course"
        subprocess.run(["cp", "-a", term, shared], check=True)
        # A fresh process, which imports as root and then becomes the other user: this one has threads.
        code = f"from autograder.grading.nbgrader import group_test; group_test.act_as_assistant({str(shared)!r})"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert exported(shared)["ada"]["score"] == "19.5" and len(secret(shared)) == 32
        change(shared, group="")
        assert (shared / ".meshcraft").stat().st_mode & 0o7777 == 0o700 and grade(shared, again=True)
        with pytest.raises(CourseError, match="this machine has no group 'nosuchgroup'"):
            require_group("nosuchgroup")

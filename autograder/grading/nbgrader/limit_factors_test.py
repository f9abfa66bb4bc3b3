"""A course's own limits: checked before they are released, and the same for check and grade."""

import nbformat
import pytest

from autograder.check import check, check_notebook
from autograder.contract.task import ChoiceError
from autograder.contract.verdict import PARTIAL, PASS
from autograder.grading.inside.intake import read_notebook
from autograder.grading.nbgrader.bridge import Agrees
from autograder.grading.nbgrader.limit_factors import limits_in, parse_limits, require_stated
from autograder.grading.nbgrader.new_course import init_course
from autograder.grading.nbgrader.settings import CourseError, read_settings, write_settings
from autograder.grading.nbgrader.submissions import find_submissions
from autograder.grading.outside.pipeline import Grader
from autograder.grading.outside.sandbox import best_level
from solutions.fsdp import fsdp_loss

NAME, FACT = "fsdp_loss", "live temporaries"


def changed(course, *options):
    limits = parse_limits([*options], ["fsdp"])
    return init_course(course, chapters=[], due={}, settings={}, students=[], limits=limits)


def limit_of(result):
    (fact,) = [fact for fact in result.facts if fact.name == FACT]
    assert isinstance(fact.limit, float)
    return fact.limit


@pytest.mark.long
def test_a_limit_is_stated_in_the_notebook_and_check_and_grade_use_it(course, tmp_path):
    source = course / "source" / "fsdp" / "fsdp.ipynb"
    (usual,) = check_notebook(source, "fsdp", [NAME]).functions
    changed(course, f"{NAME}.{FACT}=1.5")
    released = nbformat.read(course / "release" / "fsdp" / "fsdp.ipynb", as_version=4)
    assert any(each.source == f'check({NAME}, limits={{"{FACT}": 1.5}})' for each in released.cells)
    assert sum("“live temporaries” 1.5 times as large" in each.source for each in released.cells) == 1
    report = check_notebook(source, "fsdp", [NAME])
    assert report.functions[0].verdict == PASS and limit_of(report.functions[0]) == pytest.approx(1.5 * limit_of(usual))
    assert f"{NAME}, in this course: the limit of “{FACT}” is 1.5 times the usual one" in report.notes
    factors = require_stated(course, "fsdp")
    ungraded = {"shard_params", "gather_params", "fsdp_train_step", "hybrid_shard_step"}
    for course_factors, verdict in ((factors, PASS), ({NAME: {FACT: 0.5}}, PARTIAL)):
        with Grader("fsdp", secret=b"s" * 32, level=best_level(), ungraded=ungraded, factors=course_factors) as grader:
            (official,) = grader.grade_notebook(read_notebook(source), "ada").functions
        assert official.verdict == verdict
        assert limit_of(official) == pytest.approx(course_factors[NAME][FACT] * limit_of(usual)), (
            "never the submission's own"
        )
    (missed,) = official.missed
    assert "In this course the limit is 0.5 times the usual one" in missed.message
    changed(course, f"{NAME}.{FACT}=1")
    assert limits_in(read_settings(course), "fsdp") == {} == require_stated(course, "fsdp")
    again = nbformat.read(course / "release" / "fsdp" / "fsdp.ipynb", as_version=4)
    assert any(each.source == f"check({NAME})" for each in again.cells)


@pytest.mark.long
def test_a_limit_of_no_fact_one_that_the_solution_misses_and_one_changed_by_hand_are_refused(course, monkeypatch):
    with pytest.raises(CourseError, match=r"no fact 'memory' whose limit .*; it has: .*, live temporaries, predicted"):
        changed(course, f"{NAME}.memory=2")
    with pytest.raises(
        CourseError, match=r"own fsdp_loss would not meet “live temporaries”: .* choose a larger factor"
    ):
        changed(course, f"{NAME}.{FACT}=0.5")
    with pytest.raises(CourseError, match="'nothing' is not in this course"):
        changed(course, "nothing.values=2")
    assert parse_limits([f"fsdp.{NAME}.{FACT}=2"], ["fsdp"]) == parse_limits([f"{NAME}.{FACT}=2"], ["fsdp", "zero"])
    with pytest.raises(ChoiceError, match="no fact 'values' whose limit a course may change"):
        check(fsdp_loss, limits={"values": 2.0})
    with pytest.raises(CourseError, match=r"0.1 to 10 times the usual limit"):
        changed(course, f"{NAME}.{FACT}=40")
    settings = read_settings(course)
    write_settings(course, type(settings)(**{**vars(settings), "limits": {f"fsdp.{NAME}.{FACT}": 2.0}}))
    assert find_submissions(course, "fsdp") == []
    with pytest.raises(CourseError, match="judged on what they were told"):
        require_stated(course, "fsdp")
    source = course / "source" / "fsdp" / "fsdp.ipynb"
    monkeypatch.chdir(course)
    with pytest.raises(CourseError, match=r"source/fsdp/fsdp.ipynb states the limits of the chapter"):
        Agrees().preprocess(nbformat.read(source, as_version=4), {"nbgrader": {"assignment": "fsdp"}})

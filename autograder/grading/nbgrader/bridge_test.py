"""Verdicts arrive in nbgrader's gradebook and on the feedback page, whatever the submitted notebook says."""

import re
import shutil
from copy import deepcopy
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbgrader import utils
from nbgrader.api import Gradebook
from nbgrader.converters import Autograde

from autograder.contract import task as contract
from autograder.contract.verdict import FAIL, NEEDS_HUMAN, PARTIAL, PASS, STUDENT_ERROR, Fact, Report, Result
from autograder.grading.nbgrader import booking, bridge, feedback
from autograder.grading.nbgrader.course import make_course, open_ledger
from autograder.grading.nbgrader.ledger import digest, key
from autograder.release.converters import NbgraderError, course_config, nbgrader_quiet, run_nbgrader

TASKS = contract.load("fsdp").tasks
FIRST = TASKS[0].name


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    return make_course(tmp_path_factory.mktemp("course"), ["fsdp"])


@pytest.fixture
def course(released, tmp_path):
    return Path(shutil.copytree(released, tmp_path / "course"))


@pytest.fixture
def ledger(course):
    with open_ledger(course) as ledger:
        yield ledger


def report(verdict=PASS, points=None, **more):
    first = Result(FIRST, TASKS[0].points if points is None else points, float(TASKS[0].points), verdict, **more)
    others = (Result(task.name, float(task.points), float(task.points), PASS) for task in TASKS[1:])
    return Report("fsdp", (first, *others), isolation="bubblewrap")


def hand_in(course, ledger, student, judged, change=lambda notebook: None, text=""):
    notebook = nbformat.read(course / "release" / "fsdp" / "fsdp.ipynb", as_version=4)
    notebook.cells[0].source += f" of {student}"
    change(notebook)
    path = course / "submitted" / student / "fsdp" / "fsdp.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text or nbformat.writes(notebook))
    data = path.read_bytes()
    ledger.submit("fsdp", student, key(data, "contract"), digest(data))
    if judged:
        ledger.record(key(data, "contract"), judged)
    return {student: path}


def cell(notebook, name):
    return next(c for c in notebook.cells if c.metadata.get("nbgrader", {}).get("grade_id") == name)


def grades(course, student):
    with nbgrader_quiet(), Gradebook(f"sqlite:///{course / 'gradebook.db'}") as gradebook:
        found = gradebook.find_submission_notebook("fsdp", "fsdp", student).grades
        return {grade.name: (grade.auto_score, grade.max_score, grade.needs_manual_grade) for grade in found}


@pytest.mark.parametrize(
    ("verdict", "points", "expected"),
    [
        (PASS, 2.0, (2.0, 2.0, False)),
        (PARTIAL, 0.67, (0.67, 2.0, False)),
        (FAIL, 0.0, (0.0, 2.0, False)),
        (NEEDS_HUMAN, 0.0, (None, 2.0, True)),
    ],
)
def test_points_arrive_in_the_gradebook(course, ledger, verdict, points, expected):
    paths = hand_in(course, ledger, "ada", report(verdict, points))
    assert booking.book(course, "fsdp", ledger, paths) == {}
    assert grades(course, "ada")[f"check-{FIRST}"] == expected


def test_the_question_waits_for_a_person_if_it_was_answered(course, ledger):
    def answer(notebook):
        cell(notebook, "question").source = "Because."

    paths = hand_in(course, ledger, "ada", report(), answer) | hand_in(course, ledger, "bob", report())
    assert booking.book(course, "fsdp", ledger, paths) == {}
    assert grades(course, "ada")["question"][::2] == (None, True)
    assert grades(course, "bob")["question"][::2] == (0.0, False)


def test_a_cell_without_output_is_an_error_here_and_full_points_in_stock_nbgrader(course):
    notebook = nbformat.read(course / "release" / "fsdp" / "fsdp.ipynb", as_version=4)
    check = cell(notebook, f"check-{FIRST}")
    assert utils.determine_grade(check) == (2.0, 2.0)
    with pytest.raises(bridge.BridgeError, match=f"no verdict for the cell check-{FIRST}"):
        bridge.write_verdicts(notebook, Report("fsdp", report().functions[1:]))
    with pytest.raises(bridge.BridgeError, match=r"worth 2\.0 points in the released notebook, its verdict says 3\.0"):
        bridge.write_verdicts(notebook, Report("fsdp", (Result(FIRST, 3.0, 3.0, PASS),)))


def test_no_verdict_no_grade(course, ledger):
    hand_in(course, ledger, "ada", None)
    config = course_config(course, "fsdp", "ada")
    bridge.configure(config, course)
    with pytest.raises(NbgraderError, match="no verdict for ada; run `meshcraft grade fsdp`"):
        run_nbgrader(Autograde, config)
    assert not (course / "autograded" / "ada" / "fsdp").exists()


def test_booking_again_changes_nothing_and_keeps_what_a_person_gave(course, ledger):
    paths = hand_in(course, ledger, "ada", report(PARTIAL, 1.0))
    done = []
    booking.book(course, "fsdp", ledger, paths, done.append)
    booking.book(course, "fsdp", ledger, paths, done.append)
    assert done == ["ada"]
    with nbgrader_quiet(), Gradebook(f"sqlite:///{course / 'gradebook.db'}") as gradebook:
        set_score(gradebook.find_grade("question", "fsdp", "fsdp", "ada"), 1.5)
        gradebook.db.commit()
    before = grades(course, "ada")[f"check-{FIRST}"]
    ledger.booked("fsdp", "ada", None)
    assert booking.book(course, "fsdp", ledger, paths) == {}
    assert grades(course, "ada")[f"check-{FIRST}"] == before
    with nbgrader_quiet(), Gradebook(f"sqlite:///{course / 'gradebook.db'}") as gradebook:
        assert score_of(gradebook.find_grade("question", "fsdp", "fsdp", "ada")) == 1.5


def set_score(grade: Any, score: float):
    grade.manual_score = score


def score_of(grade: Any) -> Any:
    return grade.manual_score


def test_tampered_notebooks_get_the_released_cells_and_points(course, ledger):
    def tamper(notebook):
        cell(notebook, f"check-{FIRST}").metadata.nbgrader.points = 1000
        cell(notebook, f"check-{TASKS[1].name}").source = "print('nothing to see')"
        notebook.cells = [c for c in notebook.cells if c.id != f"check-{TASKS[2].name}"]
        twin = deepcopy(cell(notebook, FIRST))
        twin.source, twin.id = "# the twin", "twin"
        notebook.cells.append(twin)
        invented = deepcopy(cell(notebook, f"check-{FIRST}"))
        invented.metadata.nbgrader.grade_id, invented.id = "check-invented", "invented"
        notebook.cells.append(invented)
        notebook.metadata.kernelspec = {"name": "bash", "display_name": "Bash", "language": "bash"}
        notebook.cells[1].outputs = [nbformat.v4.new_output("stream", text="mine")]

    paths = hand_in(course, ledger, "eve", report(), tamper)
    assert booking.book(course, "fsdp", ledger, paths) == {}
    found = grades(course, "eve")
    assert {name: max_score for name, (_, max_score, _) in found.items()} == {
        **{f"check-{task.name}": task.points for task in TASKS},
        "question": 2.0,
    }
    copy = nbformat.read(course / "autograded" / "eve" / "fsdp" / "fsdp.ipynb", as_version=4)
    assert cell(copy, f"check-{TASKS[1].name}").source == f"check({TASKS[1].name})"
    assert cell(copy, FIRST).source == "# the twin" and copy.metadata.kernelspec.name == "python3"
    assert len(cell(copy, f"check-{FIRST}").outputs) == 1
    assert {len(c.outputs) for c in copy.cells if c.cell_type == "code" and not utils.is_grade(c)} == {0}


def test_only_the_notebook_of_a_submission_reaches_nbgrader(course, ledger):
    paths = hand_in(course, ledger, "eve", report())
    folder = course / "submitted" / "eve" / "fsdp"
    (folder / "numpy.py").write_text("stolen = True")
    (folder / "secret.txt").symlink_to(course / ".meshcraft" / "secret")
    booking.book(course, "fsdp", ledger, paths)
    assert [path.name for path in (course / "autograded" / "eve" / "fsdp").iterdir()] == ["fsdp.ipynb"]


def test_an_unreadable_notebook_still_gets_its_verdict(course, ledger):
    judged = report(STUDENT_ERROR, 0.0, message="it is not JSON")
    paths = hand_in(course, ledger, "ada", judged, text="{not json")
    assert booking.book(course, "fsdp", ledger, paths) == {}
    assert grades(course, "ada")[f"check-{FIRST}"] == (0.0, 2.0, False)


def test_nbgraders_own_autograde_takes_no_old_verdict_for_a_new_submission(course, ledger):
    (path,) = hand_in(course, ledger, "ada", report()).values()
    config = course_config(course, "fsdp", "ada")
    bridge.configure(config, course)
    run_nbgrader(Autograde, config)
    assert grades(course, "ada")[f"check-{FIRST}"] == (2.0, 2.0, False)
    path.write_text(path.read_text() + " ")
    config.Autograde.force = True
    with pytest.raises(NbgraderError, match="has changed since it was graded"):
        run_nbgrader(Autograde, config)


def test_half_made_folders_are_removed_and_whole_ones_stay(course, ledger):
    paths = hand_in(course, ledger, "ada", report()) | hand_in(course, ledger, "bob", report())
    booking.book(course, "fsdp", ledger, {"ada": paths["ada"]})
    half = course / "autograded" / "bob" / "fsdp"
    half.mkdir(parents=True)
    assert booking.clean_half_made(course, ledger.status("fsdp")) == [half]
    assert (course / "autograded" / "ada" / "fsdp" / "fsdp.ipynb").exists()


def test_the_feedback_page_shows_the_facts_and_asks_no_other_host(course, ledger):
    evil = '<script>alert(1)</script> ![x](http://evil.example/x.png) <a href="http://evil.example">go</a>'

    def answer(notebook):
        cell(notebook, "question").source = evil
        cell(notebook, FIRST).source += f"\n# {evil}"

    fact = Fact("temporaries", False, 1843200, 1179648, "bytes", 1024000, 1843200, "data=8", f"{FIRST}:14", evil)
    judged = report(PARTIAL, 0.67, facts=(fact,), denied=("socket", evil), message=evil)
    booking.book(course, "fsdp", ledger, hand_in(course, ledger, "eve", judged, answer))
    (path,), problems = feedback.write_feedback(course, "fsdp")
    page = path.read_text()
    assert problems == {} and path == course / "feedback" / "eve" / "fsdp" / "fsdp.html"
    expected = ["partial", "0.67 / 2", "1,843,200", "1,179,648", "data=8", f"{FIRST}:14", "socket", "bubblewrap"]
    assert [word for word in expected if word not in page] == []
    assert page.count('<span class="marked">') == 1
    tags = Tags()
    tags.feed(page)
    assert "default-src 'none'" in page and not {"script", "img", "link", "iframe", "object"} & {*tags.names}
    assert tags.addresses and all(address.startswith("#") for address in tags.addresses)
    assert not re.search(r"url\(|@import", page)


class Tags(HTMLParser):
    """The tags of a page, and what they refer to."""

    def __init__(self):
        super().__init__()
        self.names, self.addresses = [], []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action", "background")]


def test_a_regrade_writes_the_same_bytes(course, ledger):
    paths = hand_in(course, ledger, "ada", report())
    booking.book(course, "fsdp", ledger, paths)
    first = (course / "autograded" / "ada" / "fsdp" / "fsdp.ipynb").read_bytes()
    ledger.record(ledger.entry("fsdp", "ada").key, replace(report(), notes=("again",)))
    ledger.record(ledger.entry("fsdp", "ada").key, report())
    ledger.booked("fsdp", "ada", None)
    booking.book(course, "fsdp", ledger, paths)
    assert (course / "autograded" / "ada" / "fsdp" / "fsdp.ipynb").read_bytes() == first

"""An instructor's own course: created, changed, released, collected over nbgrader's exchange, graded late, exported."""

import csv
import json
import re
import shutil
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbconvert.exporters import HTMLExporter
from nbformat.v4 import new_markdown_cell, new_notebook
from traitlets.config import Config

from autograder.grading.nbgrader import booking, bridge, register
from autograder.grading.nbgrader.conftest import WHERE, cell, file_and_book, hand_in, report
from autograder.grading.nbgrader.course import open_gradebook, open_ledger, secret
from autograder.grading.nbgrader.due_dates import due_dates, parse_due
from autograder.grading.nbgrader.export import canvas_csv, counts, grades_csv, overview, penalties
from autograder.grading.nbgrader.feedback import write_feedback
from autograder.grading.nbgrader.late_penalty import LatePenalty, renew_penalties
from autograder.grading.nbgrader.new_course import init_course
from autograder.grading.nbgrader.rosters import read_students
from autograder.grading.nbgrader.settings import CourseError

DECEMBER, MARCH = datetime(2026, 12, 1, 17, 0, tzinfo=UTC), datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
NEXT_DAY = "2026-03-02 18:00:00.000000 UTC"
# Each command in a separate process, as if typed; nbgrader is imported once.
NBGRADER = """
import json, os, sys
from nbgrader.apps import NbGraderApp
for folder, data, command in json.load(sys.stdin):
    if not os.fork():
        os.chdir(folder)
        os.environ["JUPYTER_DATA_DIR"] = data
        sys.exit(NbGraderApp.launch_instance(command))
    if os.wait()[1]:
        sys.exit(f"nbgrader {command} failed in {folder}")
"""


def init(folder, chapters=("fsdp",), due=None, students=(), **settings):
    dates = {} if due is None else {"fsdp": due}
    return init_course(folder, chapters=[*chapters], due=dates, settings=settings, students=[*students])


@pytest.fixture(scope="module")
def template_course(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "course"
    init(folder, late_per_day=10.0, late_at_most=50.0, name="dist")
    return folder


@pytest.fixture
def course(template_course, tmp_path):
    return Path(shutil.copytree(template_course, tmp_path / "course"))


def nbgrader(*steps):
    """nbgrader's own commands, each run in a folder by a user with separate Jupyter data."""
    request = json.dumps([(str(folder), str(folder / ".data"), command.split()) for folder, command in steps])
    done = subprocess.run([sys.executable, "-c", NBGRADER], input=request, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stderr


def student_home(folder, name, exchange):
    home = folder / name
    home.mkdir()
    lines = [f'c.CourseDirectory.student_id = "{name}"', f'c.Exchange.root = "{exchange}"']
    text = "\n".join(["c = get_config()", 'c.CourseDirectory.course_id = "dist"', *lines])
    (home / "nbgrader_config.py").write_text(text)
    return home


def judge(course, *students):
    """Full points for everyone, filed and booked as in grading."""
    assert file_and_book(course, dict.fromkeys(students, report())) == {}


def score_by_hand(course, student, points):
    """Score as formgrader's page saves it."""
    with open_gradebook(course) as gradebook:
        grade: Any = gradebook.find_grade("question", *WHERE, student)
        grade.manual_score, grade.needs_manual_grade = points, False
        gradebook.db.commit()


def row_of(course, student):
    renew_penalties(course, "fsdp")
    return next(row for row in csv.DictReader(grades_csv(course, ["fsdp"]).splitlines()) if row["student"] == student)


def test_a_course_is_made_with_what_its_owner_alone_may_see(tmp_path):
    outcome = init(tmp_path / "course", due=DECEMBER, late_per_day=10.0)
    course = tmp_path / "course"
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (course, course / ".meshcraft")]
    assert modes == [0o700, 0o700] and stat.S_IMODE((course / ".meshcraft" / "secret").stat().st_mode) == 0o600
    assert "2026-12-01" in outcome["chapter fsdp"] and "10%" in outcome["late"]
    assert due_dates(course) == {"fsdp": DECEMBER}
    released = (course / "release" / "fsdp" / "fsdp.ipynb").read_text()
    assert "Due 2026-12-01" in released and "BEGIN SOLUTION" not in released


@pytest.mark.parametrize("which", [".meshcraft", ".meshcraft/secret"])
def test_a_secret_that_others_can_read_is_refused_with_the_remedy(course, which):
    (course / which).chmod(0o755)
    with pytest.raises(CourseError, match=r"open to other users .*chmod 700 .*/\.meshcraft && chmod 600 .*/secret"):
        secret(course)
    (course / which).chmod(0o700)
    if which.endswith("secret"):
        (course / which).chmod(0o600)
    assert len(secret(course)) == 32


def test_another_init_changes_only_what_is_requested_and_loses_nothing(course):
    source = course / "source" / "fsdp" / "fsdp.ipynb"
    notebook = nbformat.read(source, as_version=4)
    notebook.cells.append(new_markdown_cell("Mine.", id="mine"))
    nbformat.write(notebook, source)
    config = course / "nbgrader_config.py"
    config.write_text(config.read_text() + "c.Exchange.timezone = 'CET'\n")
    before = secret(course), config.read_text(), source.read_text()
    init(course, ())
    assert (secret(course), config.read_text(), source.read_text()) == before
    init(course, (), due=DECEMBER, late_at_most=30.0, students=[{"id": "ada"}])
    init(course, (), students=[{"id": "ada", "email": "ada@example.org"}])
    released = (course / "release" / "fsdp" / "fsdp.ipynb").read_text()
    assert [part for part in ("Due 2026-12-01", "10%", "30% at most", "Mine.") if part not in released] == []
    with open_gradebook(course) as gradebook:
        assert [(s.id, s.email) for s in gradebook.students] == [("ada", "ada@example.org")]
    init(course, (), due=None)
    assert due_dates(course)["fsdp"]
    init_course(course, chapters=[], due={"fsdp": None}, settings={}, students=[])
    assert due_dates(course) == {"fsdp": None}
    assert "Due" not in (course / "release" / "fsdp" / "fsdp.ipynb").read_text()


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(CourseError, match=r"contains something else \(thesis.tex\)"):
        init(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    (tmp_path / "thesis.tex").rename(tmp_path / "nbgrader_config.py")
    (tmp_path / "submitted").mkdir()
    assert register.log(tmp_path) == []  # reading a folder does not make it a course
    with pytest.raises(CourseError, match="a configuration without Meshcraft"):
        init(tmp_path)


def test_due_dates_keep_their_time_zone_and_what_is_none_says_how_one_is_written():
    dates = {"2026-12-01T18:00+01:00": DECEMBER, "2026-12-01T18:00Z": DECEMBER.replace(hour=18), "none": None}
    assert {text: parse_due(text) for text in dates} == dates
    local = parse_due("2026-12-01T18:00")
    assert local and local.astimezone().hour == 18
    for text in ("tomorrow", "2026-12-01", "2026-13-01T10:00"):
        with pytest.raises(CourseError, match=r"write 2026-12-01T18:00"):
            parse_due(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("name\nada\n", "has the columns name; it needs the column id, and may have first_name"),
        ("id\n", "names no students"),
        ("", "names no students"),
        ("Name,Email,Role\nGrace Hopper,grace@x.org,Instructor\n", "names no students"),
        ("id\nada\nada\n", "line 3: ada is in line 2 already"),
        ("id\n../ada\n", r"line 2: the id '\.\./ada' cannot name a folder"),
    ],
)
def test_a_list_of_students_that_cannot_be_used_says_where(tmp_path, text, sentence):
    (tmp_path / "class.csv").write_text(text)
    with pytest.raises(CourseError, match=sentence):
        read_students(tmp_path / "class.csv")


@pytest.mark.parametrize(("hours", "off"), [(0.01, 1.0), (24, 1.0), (24.01, 2.0), (49, 3.0), (1000, 5.0)])
def test_each_day_begun_takes_off_its_share_up_to_the_limit(hours, off):
    config = Config({"LatePenalty": {"per_day": 10.0, "at_most": 50.0}})
    assert LatePenalty(config=config).late_submission_penalty("ada", 10.0, hours * 3600) == off
    assert LatePenalty().late_submission_penalty("ada", 10.0, hours * 3600) is None


def test_a_course_from_release_to_feedback_over_nbgraders_exchange(course, tmp_path):
    people = [{"id": "bob"}, {"id": "idle"}]
    init(course, (), datetime.now(UTC) - timedelta(hours=30), people, exchange=str(tmp_path / "exchange"))
    home = student_home(tmp_path, "bob", tmp_path / "exchange")
    nbgrader((course, "release_assignment fsdp"), (home, "fetch_assignment fsdp"), (home, "submit fsdp"))
    nbgrader((course, "collect fsdp"))
    assert "Due" in (home / "fsdp" / "fsdp.ipynb").read_text()
    rows = {row["student"]: row["state"] for row in overview(course, "fsdp")}
    assert rows == {"bob": "not graded yet", "idle": "nothing submitted"}
    hand_in(course, "bob", answer="Because.")
    hand_in(course, "eve", answer="Because.", stamp="the day before yesterday, honestly")
    (course / "submitted" / "eve" / "fsdp" / "submission_secret.txt").write_text("../../../etc/passwd")
    judge(course, "bob", "eve")
    assert [path.name for path in (course / "autograded" / "eve" / "fsdp").iterdir()] == ["fsdp.ipynb"]
    rows = {row["student"]: row for row in overview(course, "fsdp")}
    assert (rows["bob"]["days_late"], rows["eve"]["days_late"]) == (2, 0)

    assert row_of(course, "bob")["late_penalty"] == "3.6"
    for student in ("bob", "eve"):
        score_by_hand(course, student, 2.0)
    row = row_of(course, "bob")
    assert (row["state"], row["late_penalty"], row["score"]) == ("graded", "4.0", "16.0")
    rows = {row["student"]: row for row in overview(course, "fsdp")}
    add = "add them with `meshcraft init . --students FILE`"
    assert rows["eve"]["why"] == f"not on the list of students; {add}; submission time unknown; counted as on time"
    assert counts([*rows.values()]) == {"nothing submitted": 1, "graded": 2}

    pages, problems = write_feedback(course, "fsdp")
    assert problems == {} and "late submission" in pages[0].read_text() and "−4" in pages[0].read_text()
    rule = "handed in 30 hours after the due date: 2 days begun, 10% of the points each, at most 50%"
    assert rule in pages[0].read_text() and penalties(course, ["fsdp"]) == {"bob": 4.0}
    released = nbgrader((course, "release_feedback fsdp"), (home, "fetch_feedback fsdp"))
    assert "Not submitted through the exchange: eve; " in released
    (fetched,) = (home / "fsdp" / "feedback").glob("*/fsdp.html")
    assert fetched.read_bytes() == pages[0].read_bytes()


def test_an_extension_a_new_due_date_and_another_time_of_handing_in_count_at_once(course):
    init(course, (), due=MARCH)
    path = hand_in(course, "ada", answer="Because.", stamp=NEXT_DAY)
    judge(course, "ada")
    score_by_hand(course, "ada", 0.0)
    assert row_of(course, "ada")["late_penalty"] == "3.6"
    with open_gradebook(course) as gradebook:
        gradebook.grant_extension("fsdp", "ada", hours=24)
    assert row_of(course, "ada")["late_penalty"] == "1.8"
    init(course, (), due=MARCH + timedelta(days=4))
    assert row_of(course, "ada")["late_penalty"] == "0.0"
    assert overview(course, "fsdp")[0]["days_late"] == 0
    (path.parent / "timestamp.txt").write_text("2026-03-06 13:00:00 UTC")
    with open_ledger(course) as ledger:
        assert booking.book(course, "fsdp", ledger, {"ada": path}) == {}
    assert overview(course, "fsdp")[0]["days_late"] == 1, "an hour after the extension, and without another verdict"


def test_a_late_penalty_of_the_instructors_own_counts_and_no_setting_lets_a_notebook_run(course):
    config = course / "nbgrader_config.py"
    own = 'c.AssignLatePenalties.plugin_class = "nbgrader.plugins.LateSubmissionPlugin"\n'
    own += 'c.LateSubmissionPlugin.penalty_method = "zero"\n'
    own += 'c.Autograde.autograde_preprocessors = ["nbgrader.preprocessors.Execute"]\n'
    config.write_text(config.read_text() + own)
    init(course, (), due=MARCH)
    hand_in(course, "ada", answer="Because.", stamp=NEXT_DAY)
    judge(course, "ada")
    score_by_hand(course, "ada", 2.0)
    assert (row_of(course, "ada")["late_penalty"], row_of(course, "ada")["score"]) == ("20.0", "0.0")
    assert "Execute" not in str(bridge.configuration(course, "fsdp").Autograde)
    config.write_text("c = get_config()\nraise ValueError('a typing error')\n")
    with pytest.raises(CourseError, match=r"nbgrader_config.py raises ValueError: a typing error; correct it"):
        bridge.configuration(course, "fsdp")


@pytest.mark.long
def test_nbgraders_own_autograde_runs_nothing_of_a_students(course, tmp_path):
    path = hand_in(course, "ada", answer="Because.")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[2].source = f"open({str(tmp_path / 'ran')!r}, 'w')"
    cell(notebook, "check-shard_params").source = f"open({str(tmp_path / 'ran')!r}, 'w')"
    nbformat.write(notebook, path)
    judge(course, "ada")
    nbgrader((course, "autograde fsdp --force"))
    assert not (tmp_path / "ran").exists() and row_of(course, "ada")["score"] == "18.0"


def test_points_given_by_hand_stay_and_wait_again_only_if_something_changed(course):
    hand_in(course, "ada", answer="Because.")
    judge(course, "ada")
    assert row_of(course, "ada")["state"] == "waits for manual grading (score so far)"
    score_by_hand(course, "ada", 1.5)
    judge(course, "ada")
    assert (row_of(course, "ada")["state"], row_of(course, "ada")["score"]) == ("graded", "19.5")
    hand_in(course, "ada", answer="Because I say so.")
    assert [row["state"] for row in overview(course, "fsdp")] == ["changed since graded"]
    judge(course, "ada")
    row = row_of(course, "ada")
    assert (row["state"], row["score"]) == ("waits for manual grading (score so far)", "19.5")


def test_canvas_gets_a_number_only_where_a_grade_is_final(course, tmp_path):
    (tmp_path / "class.csv").write_text(
        "id,first_name,last_name,lms_user_id\nada,Ada,Lovelace,101\nbob,=1+1,@SUM(A1),\nidle,,,103\n"
    )
    init(course, (), students=read_students(tmp_path / "class.csv"))
    with open_gradebook(course) as gradebook:
        gradebook.add_assignment("data_parallel")
    hand_in(course, "ada", answer="Because.")
    hand_in(course, "bob", answer="Because.")
    judge(course, "ada", "bob")
    score_by_hand(course, "ada", 1.0)
    text = canvas_csv(course, ["fsdp", "data_parallel"], {"data_parallel": "Data parallelism (4711)"})
    head, points, *rows = csv.reader(text.splitlines())
    assert head[:5] == ["Student", "ID", "SIS User ID", "SIS Login ID", "Section"]
    assert head[5:] == ["Fully sharded data parallelism", "Data parallelism (4711)"]
    assert points[0].strip() == "Points Possible" and points[1:6] == ["", "", "", "", "20.0"]
    assert rows == [
        ["Lovelace, Ada", "101", "", "ada", "", "19.0", ""],
        ["'@SUM(A1), =1+1", "", "", "bob", "", "", ""],
        ["idle", "103", "", "idle", "", "", ""],
    ]


def test_a_gradebook_that_cannot_be_used_is_one_sentence(course):
    (course / "gradebook.db").write_bytes(b"not a gradebook, and long enough to be looked at as one" * 9)
    with pytest.raises(CourseError, match=r"the gradebook .*gradebook.db cannot be used: .*run this again"):
        overview(course, "fsdp")


def test_formgrader_runs_no_markup_of_a_students_where_stock_nbgrader_does(course):
    evil = new_notebook(cells=[new_markdown_cell("<img src=x onerror='alert(1)'> <script>alert(2)</script> **fine**")])
    shown = []
    for config in (Config(), bridge.configuration(course, "fsdp")):
        config.HTMLExporter.template_name = "formgrade"
        config.HTMLExporter.setdefault("extra_template_basedirs", [str(bridge.FORMGRADER)])
        resources = {"base_url": "", "notebook_path": "", "submission_id": "", "index": 0, "total": 1}
        page, _ = HTMLExporter(config=config).from_notebook_node(evil, resources=resources)
        acts = re.search(r"<img[^>]*onerror", page) is not None
        shown.append([acts, *(part in page for part in ("<script>alert(2)", "cdnjs", "<strong>fine</strong>"))])
    assert shown == [[True, True, True, True], [False, False, False, True]]

"""The leaderboard shows passing answers only, under chosen names only, best first."""

import pytest

from autograder.contract.verdict import FAIL, PASS, Fact, Kind, Result, Unit
from autograder.grading.nbgrader.conftest import POINTS, file_and_book, hand_in, report
from autograder.grading.nbgrader.course import CourseError
from autograder.grading.nbgrader.leaderboard import leaderboard_page, rankings, read_names


def loss(milliseconds, size, verdict=PASS):
    def fact(name, kind, measured, unit, reference, of=""):
        return Fact(name, kind, verdict == PASS, measured, 2 * reference, unit=unit, reference=reference, of=of)

    time = fact("predicted time", Kind.TIME, milliseconds, Unit.MILLISECONDS, 20.0, "8xH100")
    memory = fact("live temporaries", Kind.MEMORY, size, Unit.BYTES, 4e7)
    points = POINTS["fsdp_loss"]
    return report(Result("fsdp_loss", points if verdict == PASS else 0.0, points, verdict, (memory, time)))


@pytest.fixture
def graded(course):
    reports = {"ada": loss(19.0, 5e7), "bob": loss(21.0, 3e7), "cleo": loss(1.0, 1.0, FAIL), "dan": loss(5.0, 5.0)}
    for student in reports:
        hand_in(course, student)
    file_and_book(course, reports)
    return course


def names(folder, text):
    (folder / "names.csv").write_text(text)
    return read_names(folder / "names.csv", folder)


def test_passing_answers_are_ranked_by_predicted_time_and_then_bytes(graded):
    (ranking,) = rankings(graded, "fsdp", names(graded, "student,name\nbob,=Ring\nada,<b>Swift</b>\ncleo,Zed\n"))
    assert ranking.figures == [("predicted time", "ms on 8xH100"), ("live temporaries", "bytes")]
    assert ranking.rows == [("<b>Swift</b>", [19.0, 5e7]), ("=Ring", [21.0, 3e7])]
    assert ranking.reference == [20.0, 4e7]


def test_the_page_names_nobody_who_did_not_ask_to_be_on_it_and_escapes_names(graded):
    page = leaderboard_page(graded, "fsdp", names(graded, "student,name\nada,<b>Swift</b>\n"))
    assert "&lt;b&gt;Swift&lt;/b&gt;" in page and "47.68 MiB" in page and "better" in page
    assert not any(word in page for word in ("ada", "bob", "dan", "<script", "http:", "https:"))


def test_a_class_without_passing_answers_has_an_empty_page(graded):
    assert "has passed yet" in leaderboard_page(graded, "fsdp", names(graded, "student,name\ncleo,Zed\n"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name\nZed\n", "it needs student and name, and lacks student"),
        ("student,name\neve,Zed\n", "line 2: the course has no student 'eve'"),
        ("student,name\nada,Zed\nbob,Zed\n", "line 3: the name 'Zed' is taken"),
        ("student,name\nada,Zed\nada,Zoe\n", "line 3: ada has a line already"),
        ("student,name\nada,\n", "line 2: the name is empty"),
    ],
)
def test_a_list_of_names_that_cannot_be_used_is_refused_with_its_line(graded, text, problem):
    with pytest.raises(CourseError, match=problem):
        names(graded, text)


def test_export_writes_the_leaderboard(graded, meshcraft, monkeypatch):
    monkeypatch.chdir(graded)
    (graded / "names.csv").write_text("student,name\nada,Swift\n")
    assert "wrote board.html" in meshcraft("export", "fsdp", "--leaderboard", "names.csv", "--to", "board.html").out
    assert "Swift" in (graded / "board.html").read_text()
    assert "name its file" in meshcraft("export", "fsdp", "--leaderboard", "names.csv", status=2).err
    monkeypatch.setattr("autograder.commands.course.assignments", lambda course, name: (["fsdp"], 2))
    meshcraft("export", "--leaderboard", "names.csv", "--to", "board.html", status=2)  # another chapter was left out

"""The instructor's commands, and their response to misuse."""

import json
import re
from datetime import UTC, datetime
from typing import Any

import pytest
import typer

from autograder import cli
from autograder.grading.nbgrader.due_dates import due_dates
from autograder.grading.nbgrader.settings import read_settings
from course.curriculum import ROOT


def test_a_course_is_made_and_changed_by_the_same_command(meshcraft, tmp_path):
    (tmp_path / "class.csv").write_text("id\nada\nbob\n")
    only = ("--chapter", "fsdp")
    result = meshcraft("init", "sharding", *only, "--due", "2026-12-01T18:00+01:00", "--students", "class.csv")
    assert (
        result.status == 0 and "nbgrader release_assignment fsdp" in result.out and "2 in the gradebook" in result.out
    )
    course = tmp_path / "sharding"
    assert due_dates(course) == {"fsdp": datetime(2026, 12, 1, 17, 0, tzinfo=UTC)}
    assert meshcraft("init", "sharding", *only, "--due", "fsdp=none", "--late-per-day", "10%").status == 0
    assert due_dates(course) == {"fsdp": None}
    assert (read_settings(course).name, read_settings(course).late_per_day) == ("sharding", 10.0)

    output = meshcraft("init", "sharding", "--withdraw", "bob").out
    assert "left the course: bob; `meshcraft changes --undo" in output and "release_assignment" not in output
    shown = json.loads(meshcraft("status", "--course", "sharding", "--json").out)
    assert shown["counts"] == {"nothing submitted": 2}
    assert "2 in all; nothing submitted: 2" in meshcraft("status", "--course", "sharding").out
    assert "ada,nothing submitted,,," in meshcraft("export", "--course", "sharding").out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["init", "new", "--late-per-day", "much"], "'much' is not a percentage; write 10 or 10%"),
        (["init", "new", "--late-per-day", "110%"], "late_per_day is 110; write a percentage from 0 to 100"),
        (["init", "new", "--name", "my course"], "use letters, digits and any of _ . -"),
        (["init", "new", "--due", "soon"], "write 2026-12-01T18:00"),
        (["init", "new", "--chapter", "nosuchchapter"], "there is no chapter called 'nosuchchapter'"),
        (["init", "new", "--students", "none.csv"], "the roster none.csv cannot be read: No such file"),
        (["init", "new", "--chapter", "fsdpp"], "there is no chapter called 'fsdpp'; is it fsdp?"),
        (["init", "new", "--chapter", "fsdp", "--points", "fsdp_los=2"], "is it fsdp_loss?"),
        (["init", "new", "--chapter", "fsdp", "--drop-chapter", "zero"], "zero cannot be dropped: it is not in this"),
        (["init", "new", "--chapter", "fsdp", "--exchange", "new/exchange"], "is inside the course folder"),
        (["init", "file"], "file is not a folder"),
        (["export", "--column", "fsdp=FSDP (1)"], "give --canvas, too"),
        (["export", "--canvas", "--column", "FSDP (1)"], "is not CHAPTER=NAME"),
        (["export"], "has no folder `submitted/`"),
    ],
)
def test_wrong_use_says_what_to_do(meshcraft, tmp_path, arguments, sentence):
    (tmp_path / "file").touch()
    result = meshcraft(*arguments)
    assert result.status == 2 and sentence in result.err and "Traceback" not in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


READING = {  # every command with --course, and the arguments it needs besides
    "changes": "",
    "collect": "fsdp --from x.zip",
    "collect-git": "fsdp --from .",
    "export": "fsdp",
    "extend": "fsdp ada --hours 2",
    "feedback": "fsdp",
    "grade": "fsdp --estimate",
    "new-chapter": "novel",
    "readers": "fsdp",
    "report": "fsdp",
    "request": "fsdp ada --answer no",
    "requests": "",
    "similar": "fsdp",
    "status": "fsdp",
}


def test_no_command_makes_a_course_of_a_folder_that_is_none(meshcraft, tmp_path):
    commands: Any = typer.main.get_command(cli.app)
    with_course = {name for name, each in commands.commands.items() if any("--course" in p.opts for p in each.params)}
    assert with_course - {"plan"} == {*READING}, "plan's is another option"
    (tmp_path / "thesis").mkdir()
    for command, arguments in READING.items():
        for folder in ("nowhere", "thesis"):
            result = meshcraft(command, *arguments.split(), "--course", folder)
            assert result.status == 2 and re.search(rf"{folder}\b.*course folder|course folder .*{folder};", result.err)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["thesis"]


def test_the_guide_names_commands_and_options_that_exist():
    page = (ROOT / "site" / "pages" / "teaching.md").read_text().replace("\\\n", " ")
    lines = re.findall(r"(?:^\$ |`)meshcraft ([a-z]+)([^`\n]*)", page, re.MULTILINE)
    commands: Any = typer.main.get_command(cli.app)
    known = {name: {o for p in each.params for o in p.opts} for name, each in commands.commands.items()}
    assert {command for command, _ in lines} >= {"doctor", "init", "grade", "status", "feedback", "export"}
    for command, rest in lines:
        assert set(re.findall(r"(--[a-z-]+)", rest)) <= known[command], (command, rest)
    options = {option for option in re.findall(r"^\| `(--[a-z-]+)", page, re.MULTILINE)}
    assert options and options <= known["init"]

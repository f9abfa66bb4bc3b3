"""Notebooks from git repositories, and when each was handed in."""

import os
import subprocess
from datetime import UTC, datetime

import pytest

from autograder.grading.nbgrader import repositories
from autograder.grading.nbgrader.repositories import collect_git
from autograder.grading.nbgrader.settings import CourseError

DUE = datetime(2026, 3, 1, 18, tzinfo=UTC)
EARLY, LATE = "2026-03-01T17:00:00+00:00", "2026-03-01T20:00:00+01:30"


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course whose roster and due date are given, without a gradebook."""
    names = {"ada": {"ada", "adalovelace"}, "bob": {"bob"}, "eve": {"eve"}, "joe": {"joe"}}
    monkeypatch.setattr(repositories.uploads, "identities", lambda course: names)
    monkeypatch.setattr(repositories, "due_dates", lambda course: {"fsdp": DUE})
    (tmp_path / "course").mkdir()
    return tmp_path / "course"


def commit(folder, when, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.ipynb").write_text(text)
    env = {**os.environ, "GIT_COMMITTER_DATE": when, "GIT_AUTHOR_DATE": when}
    me = ("-c", "user.name=me", "-c", "user.email=me@example.org")
    for command in (("init", "-q", "-b", "main"), ("add", "-A"), (*me, "commit", "-qm", "work", "--allow-empty")):
        subprocess.run(["git", *command], cwd=folder, env=env, check=True)


def submitted(course, student):
    folder = course / "submitted" / student / "fsdp"
    return (folder / "fsdp.ipynb").read_text(), (folder / "timestamp.txt").read_text()


def test_a_folder_of_clones_is_matched_by_name_and_dated_by_the_notebooks_commit(course, tmp_path):
    clones = tmp_path / "clones"
    commit(clones / "fsdp-ada", EARLY, fsdp="1", scratch="0")
    commit(clones / "fsdp-ada", LATE)  # a later commit that does not change the notebook
    commit(clones / "FSDP-Bob", LATE, homework="2")
    commit(clones / "fsdp-evee", EARLY, fsdp="3")
    commit(clones / "fsdp-joe", EARLY, one="4", two="5")
    commit(clones / "fsdp-zoe", EARLY, zero='{"cells": [{"cell_type": "code", "id": "ring_all_gather"}]}')
    (clones / "notes").mkdir()
    (clones / "fsdp-ada" / "fsdp.ipynb").write_text("not committed")
    collected = collect_git(course, "fsdp", clones)
    assert (collected.new, collected.late) == (["bob", "ada"], ["bob"])
    assert submitted(course, "ada") == ("1", "2026-03-01 17:00:00 UTC")
    assert submitted(course, "bob") == ("2", "2026-03-01 18:30:00 UTC")
    assert (
        "is it eve?" in collected.aside["fsdp-evee"]
        and "2 notebooks: one.ipynb, two.ipynb" in collected.aside["fsdp-joe"]
    )
    assert "not a git repository" in collected.aside["notes"]
    assert collected.aside["fsdp-zoe"] == "it is a notebook of collectives, not of fsdp"
    assert (course / ".meshcraft/unmatched/fsdp/fsdp-evee.ipynb").read_text() == "3"
    again = collect_git(course, "fsdp", clones, by="fetch")
    assert again.same == ["bob", "ada"] and again.late == ["bob", "ada"], "seen after the due date, for the first time"


def test_a_list_of_repositories_is_cloned_and_fetched_again(course, tmp_path):
    commit(tmp_path / "theirs" / "fsdp-octocat", EARLY, fsdp="1")
    (tmp_path / "list.csv").write_text(
        f"student,repository\nada,{tmp_path}/theirs/fsdp-octocat\njoe,{tmp_path}/none\nbob,ext::sh -c id\n"
    )
    collected = collect_git(course, "fsdp", tmp_path / "list.csv")
    assert collected.new == ["ada"] and {*collected.aside} == {"none", "ext::sh -c id"}
    commit(tmp_path / "theirs" / "fsdp-octocat", LATE, fsdp="2")
    collected = collect_git(course, "fsdp", tmp_path / "list.csv")
    assert (collected.replaced, collected.late, submitted(course, "ada")[0]) == (["ada"], ["ada"], "2")
    (tmp_path / "roster.csv").write_text("identifier,github_username,github_id,name\nadalovelace,Octocat,1,\n")
    collected = collect_git(course, "fsdp", tmp_path / "theirs", roster=tmp_path / "roster.csv")
    assert collected.same == ["ada"]


def interrupt(*_):
    raise KeyboardInterrupt


def test_an_interrupted_run_keeps_the_time_when_it_first_saw_a_notebook(course, tmp_path, monkeypatch):
    commit(tmp_path / "clones" / "fsdp-ada", EARLY, fsdp="1")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(repositories.uploads, "put", interrupt)
        collect_git(course, "fsdp", tmp_path / "clones", by="fetch")
    path = course / ".meshcraft" / "fetched" / "fsdp.json"
    first = path.read_text()
    assert collect_git(course, "fsdp", tmp_path / "clones", by="fetch").new == ["ada"] and path.read_text() == first
    path.write_text(first[:20])
    with pytest.raises(CourseError, match=r"fsdp.json is damaged .* restore it"):
        collect_git(course, "fsdp", tmp_path / "clones")


def test_an_invalid_source_is_a_one_sentence_error(course, tmp_path):
    (tmp_path / "list.csv").write_text("name,address\n")
    for source, says in ((tmp_path / "list.csv", "no column"), (course, "no git repository"), (tmp_path / "x", "read")):
        with pytest.raises(CourseError, match=says):
            collect_git(course, "fsdp", source)

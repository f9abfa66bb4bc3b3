"""The output for a chapter's author: what is missing or stale, and how large everything is."""

import ast
import json
import shutil
import sys
from dataclasses import replace
from typing import Any

import pytest

from autograder.commands import chapters, new_chapter, sizes, terminal
from autograder.commands.chapters import problems
from autograder.contract import task
from autograder.contract.task import load
from autograder.release import notebook, promises, reference_metrics
from course.curriculum import CHAPTERS, ROOT, Chapter, chapter

COLLECTIVES = chapter("collectives")


@pytest.fixture
def quick(monkeypatch):
    """Skip measuring the references again."""
    monkeypatch.setattr(reference_metrics, "measure", lambda name: {"ring": 1})
    monkeypatch.setattr("autograder.contract.task.references", chapters_references)


def chapters_references(name):
    return {"ring": 1}


chapters_references.cache_clear = lambda: None


def test_a_whole_chapter_has_no_problem(quick):
    assert list(problems(COLLECTIVES, ROOT)) == []


def test_each_file_that_is_missing_is_one_line_with_what_to_do(tmp_path):
    for folder in ("site", "solutions", "autograder/chapters/collectives"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "solutions" / "collectives.py").unlink()
    (tmp_path / "site" / "pages" / "profiling" / "collectives.md").unlink()
    assert list(problems(COLLECTIVES, tmp_path)) == [
        ("solutions/collectives.py is missing", "write the notebook's source there"),
        ("site/pages/profiling/collectives.md is missing", "write its walkthrough"),
    ]


def test_what_no_mutant_fails_too_many_alternatives_and_stale_files_are_named(quick, monkeypatch):
    contract, mutants, alternatives = chapters._modules("collectives")
    first = contract.tasks[0].name
    fact = next(iter(contract.explained_in))
    fewer = [mutant for mutant in mutants if mutant.task != first and fact not in mutant.fails]
    many = {**alternatives, first: list(alternatives[first]) * 4, "gone": [len, len]}
    monkeypatch.setattr(chapters, "_modules", lambda name: (contract, fewer, many))
    monkeypatch.setattr(notebook, "stale", lambda name: "- old\n+ new")
    monkeypatch.setattr(reference_metrics, "measure", lambda name: {})
    remedies = dict(problems(COLLECTIVES, ROOT))
    assert f"{first} has 0 mutants of at least 5" in remedies
    assert any(problem.startswith(f"{first} has ") and "not two or three" in problem for problem in remedies)
    assert "gone is not a function of the contract" in remedies and f"no mutant fails {fact!r}" in remedies
    built = [problem for problem, do in remedies.items() if do == "meshcraft build collectives"]
    assert len(built) == 2 and "exercises/collectives/collectives.ipynb" in built[0] and "references.json" in built[1]


def test_a_heading_that_no_page_has_and_what_the_template_says_are_named(tmp_path):
    contract = replace(load("collectives"), explained_in={"values": ("collectives", "No such heading")})
    (problem,) = chapters._headings(contract)
    assert "collectives.md has no heading “No such heading”" in problem[0]
    gone = replace(contract, explained_in={"values": ("gone", "One"), "gradients": ("gone", "Other")})
    ((message, _),) = chapters._headings(gone)
    assert message == "EXPLAINED_IN refers to site/pages/gone.md, which does not exist"
    (tmp_path / "site" / "pages").mkdir(parents=True)
    page = tmp_path / "site" / "pages" / "collectives.md"
    page.write_text("# Collectives\n\nSay here what the chapter is about: sums.\n")
    assert [message for message, _ in chapters._placeholders(COLLECTIVES, tmp_path)] == [
        "site/pages/collectives.md, line 3, is a placeholder of the template"
    ]


def test_a_solution_that_cannot_be_measured_is_a_sentence(monkeypatch):
    def fails(task, function):
        raise ValueError("the shapes differ")

    monkeypatch.setattr(reference_metrics, "look", fails)
    messages = [message for message, _ in problems(chapter("zero"), ROOT)]
    assert any(
        "zero: " in message and "ValueError: the shapes differ; wrapping.py and" in message for message in messages
    ), messages
    with pytest.raises(notebook.BuildError, match="there is no such function in"):
        reference_metrics._look("zero", load("zero").tasks[0], None, "gathers")


def test_an_own_chapter_that_cannot_be_imported_is_a_sentence(monkeypatch):
    monkeypatch.setattr(task, "is_own", lambda name: True)
    monkeypatch.setitem(sys.modules, "autograder.chapters.zero", None)
    with pytest.raises(task.ChapterError, match="zero cannot be imported: ModuleNotFoundError: import of") as error:
        load.__wrapped__("zero")
    assert terminal._status(error.value) == terminal.USAGE


def test_check_course_exits_1_with_a_problem_and_0_without(meshcraft, monkeypatch):
    monkeypatch.setattr(chapters, "problems", lambda entry, root: [("x is missing", "write it")])
    result = meshcraft("check-course", "fsdp")
    assert result.status == 1 and "x is missing" in result.out and "write it" in result.out
    assert json.loads(meshcraft("check-course", "fsdp", "--json").out)["problems"] == [
        {"chapter": "fsdp", "problem": "x is missing", "do": "write it"}
    ]
    monkeypatch.setattr(chapters, "problems", lambda entry, root: [])
    result = meshcraft("check-course")
    assert result.status == 0 and f"{len(CHAPTERS)} chapters, and nothing is missing" in result.out
    assert meshcraft("check-course", "nosuchchapter").status == 2
    assert "give --sizes, too" in meshcraft("check-course", "--seconds", "x.xml").err


def test_promises_are_shown_with_the_facts_that_hold_them(meshcraft, monkeypatch):
    quotes = {"sends nothing": ("communication",), "is useful": ()}
    monkeypatch.setattr(promises, "promised", lambda chapter: {"shard_params": quotes})
    rows = json.loads(meshcraft("check-course", "fsdp", "--promises", "--json").out)["promises"]
    assert {row["sentence"]: tuple(row["facts"]) for row in rows} == quotes
    shown = meshcraft("check-course", "fsdp", "--promises").out
    assert "sends nothing" in shown and "communication" in shown and "nothing: it explains" in shown


def test_sizes_count_what_is_written_by_hand_and_seconds_by_chapter(meshcraft, tmp_path):
    cases = {
        "autograder.chapters.fsdp.fsdp_test": ("test_limits", 1),
        "autograder.chapters.chapters_test": ("test_mutant[pipeline-some-name]", 2),
        "site.examples_test": ("test_page[async_tensor_parallel_loses]", 4),
        "site.tensor_parallel_test": ("test_numbers", 8),
        "autograder.grading.outside.pipeline_test": ("test_wire", 16),
    }
    rows = [f'<testcase classname="{module}" name="{name}" time="{t}"/>' for module, (name, t) in cases.items()]
    report = tmp_path / "junit.xml"
    report.write_text(f"<testsuites><testsuite>{''.join(rows)}</testsuite></testsuites>")
    data = json.loads(meshcraft("check-course", "--sizes", "--json", "--seconds", str(report)).out)
    seconds = {row["chapter"]: row["seconds"] for row in data["chapters"] if row["seconds"]}
    assert seconds == {"fsdp": 1, "pipeline": 2, "async_tensor_parallel": 4, "tensor_parallel": 8}
    assert data["other_seconds"] == 16
    (fsdp,) = (row for row in data["chapters"] if row["chapter"] == "fsdp")
    text = (ROOT / "solutions" / "fsdp.py").read_text()
    assert fsdp["solution"] == {"files": 1, "lines": text.count("\n")} and fsdp["tests"]["files"] == 1
    assert data["python_lines"] == sum(data["python"].values()) > 10_000
    assert sizes.chapter_of("looping_pipeline_sync", ["pipeline", "looping_pipeline"]) == "looping_pipeline"
    shown = meshcraft("check-course", "--sizes").out
    assert "transformer_3d" in shown and "autograder/grading" in shown
    assert "is not what `pytest --junitxml=" in meshcraft("check-course", "--sizes", "--seconds", "Makefile").err


def test_a_new_chapter_has_every_file_and_is_the_curriculums_last(meshcraft, monkeypatch, tmp_path):
    for folder in ("course", "site"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "course/curriculum.py", tmp_path / "course/curriculum.py")
    monkeypatch.setattr("course.curriculum.ROOT", tmp_path)
    result = meshcraft("new-chapter", "novel", "--title", "A novel")
    assert result.status == 0 and "meshcraft build novel" in result.out
    entry = Chapter("novel", "A novel", "what you learn in it")
    missing = [message for message, _ in problems(entry, tmp_path) if not message.startswith("it cannot be imported")]
    assert missing == []
    for path in (path for path in tmp_path.rglob("*.py")):
        ast.parse(path.read_text())
        assert max(map(len, path.read_text().splitlines())) <= 120, path
    names: dict[str, Any] = {"__file__": str(tmp_path / "course/curriculum.py"), "__name__": "curriculum"}
    exec((tmp_path / "course" / "curriculum.py").read_text(), names)
    assert [known.name for known in names["CHAPTERS"]] == [*(known.name for known in CHAPTERS), "novel"]
    for name in ("novel", "fsdp", "Novel", "class", "two words"):
        assert meshcraft("new-chapter", name).status == 2
    page = tmp_path / "site/pages/sequel.md"
    page.write_text("written before")
    refused = meshcraft("new-chapter", "sequel")
    assert refused.status == 2 and "site/pages/sequel.md would be overwritten" in refused.err
    assert page.read_text() == "written before" and not (tmp_path / "solutions/sequel.py").exists()
    page.unlink()
    assert meshcraft("new-chapter", "sequel", "--after", "fsdp").status == 0
    exec((tmp_path / "course" / "curriculum.py").read_text(), names)
    order = [known.name for known in names["CHAPTERS"]]
    assert order.index("sequel") == order.index("fsdp") + 1 and order[-1] == "novel"
    monkeypatch.setattr(new_chapter, "require_chapter", str)
    assert meshcraft("new-chapter", "third", "--after", "sequel", "--function", "scatter").status == 0
    exec((tmp_path / "course" / "curriculum.py").read_text(), names)
    third = names["CHAPTERS"][order.index("sequel") + 1]
    assert (third.name, third.names) == ("third", ["scatter"])
    assert "def scatter(" in (tmp_path / "solutions/third.py").read_text()
    assert meshcraft("new-chapter", "fourth", "--function", "two words").status == 2

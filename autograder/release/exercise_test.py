"""Run notebooks in a real Jupyter kernel, as a learner does: exercises with stubs and solved, and the primer."""

import os
import re

import nbformat
import pytest
from nbclient import NotebookClient

from autograder.contract.task import load
from autograder.release.notebook import source_notebook
from course.curriculum import CHAPTERS, PRIMER, ROOT

CHAPTER_NAMES = [entry.name for entry in CHAPTERS]
# Every chapter's lab runs in a kernel, and the checks of one: references and alternatives are judged without it, the
# latter from cells, too. With MESHCRAFT_FULL, every chapter's stubs run there.
CHECKED = "collectives"
RELEASED = CHAPTER_NAMES if os.environ.get("MESHCRAFT_FULL") else [CHECKED]


def run(chapter, tmp_path, *, solved, checked=True):
    notebook = nbformat.read(ROOT / "exercises" / chapter / f"{chapter}.ipynb", as_version=4)
    built = source_notebook(chapter).cells if solved else ()
    answers = {c.metadata.nbgrader.grade_id: c.source for c in built if "nbgrader" in c.metadata}
    for cell in notebook.cells:
        roles = cell.metadata.get("nbgrader", {})
        if solved and roles.get("solution"):
            cell.source = answers[roles.grade_id]
        elif roles.get("grade") and not checked:
            cell.source = ""
    client = NotebookClient(notebook, timeout=300, allow_errors=True, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    return notebook


def outputs(notebook, kind):
    return [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs if kind(out)]


def is_error(out):
    return out.output_type == "error" or (out.output_type == "stream" and out.name == "stderr")


def checks(notebook):
    """Points and table of each check cell."""
    cells = [c for c in notebook.cells if c.get("metadata", {}).get("nbgrader", {}).get("grade")]
    code = [c for c in cells if c.cell_type == "code"]
    return {c.metadata.nbgrader.grade_id.removeprefix("check-"): c.outputs[-1].data for c in code}


def test_no_notebook_and_no_hint_names_a_function_that_notebooks_do_not_have():
    texts = [*(ROOT / "solutions").glob("*.py"), *(ROOT / "autograder" / "chapters").glob("*/hints.md")]
    assert [path.name for path in texts if re.search(r"(?<!meshcraft )\bprofile\(", path.read_text())] == []


@pytest.mark.long
def test_the_primer_runs_from_start_to_end_and_shows_its_pictures_without_a_word_on_stderr(tmp_path):
    notebook = run(PRIMER.name, tmp_path, solved=False)
    assert outputs(notebook, is_error) == []
    pictures = outputs(notebook, lambda out: "<svg" in out.get("data", {}).get("text/html", ""))
    source = "".join(cell.source for cell in notebook.cells)
    assert len(pictures) == 7 and source.count("display(") == 4
    assert not any("nbgrader" in cell.metadata for cell in notebook.cells)


@pytest.mark.long
@pytest.mark.parametrize("chapter", CHAPTER_NAMES)
def test_a_solved_notebook_runs_without_a_word_on_stderr_and_passes_its_checks(chapter, tmp_path):
    checked = chapter == CHECKED
    notebook = run(chapter, tmp_path, solved=True, checked=checked)
    if checked:
        results = checks(notebook)
        assert results.keys() == {task.name for task in load(chapter).tasks}
        short = [task.name for task in load(chapter).tasks if float(results[task.name]["text/plain"]) != task.points]
        assert short == [], re.sub("<.*?>", " ", results[short[0]]["text/html"])
    assert outputs(notebook, is_error) == []
    shown = "".join(out.data.get("text/html", "") for out in outputs(notebook, lambda out: "data" in out))
    assert not re.search(r">permute [^<]*inserted by JAX<", shown)  # a line of the notebook always requests it


@pytest.mark.long
@pytest.mark.parametrize("chapter", RELEASED)
def test_stubs_are_not_started_and_nothing_crashes(chapter, tmp_path):
    notebook = run(chapter, tmp_path, solved=False)
    results = checks(notebook)
    for task in load(chapter).tasks:
        assert float(results[task.name]["text/plain"]) == 0
        assert "not started" in results[task.name]["text/html"]
    assert all(out.ename != "DeadKernelError" for out in outputs(notebook, lambda out: out.output_type == "error"))

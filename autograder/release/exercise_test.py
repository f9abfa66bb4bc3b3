"""Notebooks as a learner runs them, in a real Jupyter kernel: exercises with stubs and solved, and the primer."""

import os
import time

import nbformat
import pytest
from nbclient import NotebookClient

from autograder.contract.task import load
from autograder.release.notebook import ROOT, source_notebook
from course.curriculum import CHAPTERS, PRIMER

CHAPTER_NAMES = [entry.name for entry in CHAPTERS]
# Stubs of all chapters are run in a kernel by `make test-full`; that none earns a point is shown without one as well.
RELEASED = CHAPTER_NAMES if os.environ.get("MESHCRAFT_FULL") else ["fsdp"]


def run(chapter, tmp_path, *, solved):
    notebook = nbformat.read(ROOT / "exercises" / chapter / f"{chapter}.ipynb", as_version=4)
    if solved:
        answers = {
            c.metadata.nbgrader.grade_id: c.source for c in source_notebook(chapter).cells if "nbgrader" in c.metadata
        }
        for cell in notebook.cells:
            if cell.get("metadata", {}).get("nbgrader", {}).get("solution"):
                cell.source = answers[cell.metadata.nbgrader.grade_id]
    client = NotebookClient(notebook, timeout=300, allow_errors=True, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    return notebook


def outputs(notebook, kind):
    return [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs if kind(out)]


def checks(notebook):
    """Points and table of each check cell."""
    cells = [c for c in notebook.cells if c.get("metadata", {}).get("nbgrader", {}).get("grade")]
    code = [c for c in cells if c.cell_type == "code"]
    return {c.metadata.nbgrader.grade_id.removeprefix("check-"): c.outputs[-1].data for c in code}


def test_the_primer_runs_from_start_to_end_and_shows_its_pictures_without_a_word_on_stderr(tmp_path):
    started = time.perf_counter()
    notebook = run(PRIMER.name, tmp_path, solved=False)
    assert time.perf_counter() - started < 60
    assert outputs(notebook, lambda out: out.output_type == "error") == []
    assert outputs(notebook, lambda out: out.output_type == "stream" and out.name == "stderr") == []
    pictures = outputs(notebook, lambda out: "<svg" in out.get("data", {}).get("text/html", ""))
    source = "".join(cell.source for cell in notebook.cells)
    assert len(pictures) == 7 and source.count("display(") == 4
    assert not any("nbgrader" in cell.metadata for cell in notebook.cells)


@pytest.mark.parametrize("chapter", CHAPTER_NAMES)
def test_solved_notebook_passes_every_check_and_its_lab_runs_without_a_word_on_stderr(chapter, tmp_path):
    notebook = run(chapter, tmp_path, solved=True)
    found = checks(notebook)
    assert {name: float(data["text/plain"]) for name, data in found.items()} == {
        task.name: task.points for task in load(chapter).tasks
    }
    assert outputs(notebook, lambda out: out.output_type == "error") == []
    assert outputs(notebook, lambda out: out.output_type == "stream" and out.name == "stderr") == []


@pytest.mark.parametrize("chapter", RELEASED)
def test_stubs_are_all_red_and_nothing_crashes(chapter, tmp_path):
    notebook = run(chapter, tmp_path, solved=False)
    found = checks(notebook)
    for task in load(chapter).tasks:
        assert float(found[task.name]["text/plain"]) == 0
        assert f"{task.name} is not written yet" in found[task.name]["text/html"]
    assert all(out.ename != "DeadKernelError" for out in outputs(notebook, lambda out: out.output_type == "error"))

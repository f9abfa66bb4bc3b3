"""If the saved notebook differs in effect from the kernel, ``check`` reports it and names the difference."""

from typing import Any

import nbformat
import pytest

from autograder.checking import judging as checking
from autograder.contract.task import load
from autograder.grading.inside.intake import read_notebook
from autograder.grading.inside.tracing import trace_cases
from autograder.grading.inside.uses import uses
from autograder.grading.outside.kernel_and_file import notes
from autograder.proof.notebooks import ANSWER, CHAPTER, HEAD, TASK

CONTRACT = load(CHAPTER).task(TASK)
CASE = next(case for case in CONTRACT.cases if "forward alone" in case.name)


def live(*cells) -> Any:
    space = {"__name__": "__main__"}
    for cell in (HEAD.replace("from autograder.check import check", ""), *cells):
        exec(compile(cell, "<live>", "exec"), space)
    return space[TASK]


@pytest.mark.parametrize(
    ("cells", "difference"),
    [
        (["ONE = 1", ANSWER], ""),
        (["ONE = 2 - 1", "import nosuchmodule", ANSWER], ""),
        (["ONE = 2", ANSWER], "ONE is 2 there and 1 here"),
        (["ONE = 1"], f"no function {TASK}"),
        ([ANSWER], "(no cell of the notebook defines ONE) (ring_all_gather:3)"),
        (["ONE = 1 / 0", ANSWER], "`ONE = 1 / 0` (one:1) failed: ZeroDivisionError"),
    ],
)
def test_only_a_difference_is_reported(tmp_path, cells, difference):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in (HEAD, *cells)])
    for cell, name in zip(notebook.cells, ("head", "one", TASK) if len(cells) > 1 else ("head", TASK), strict=False):
        cell.id = name
    nbformat.write(notebook, tmp_path / "x.ipynb")
    function = live("ONE = 1", ANSWER)
    live_result = trace_cases(CONTRACT, function, [CASE], lambda _: None)
    from_notebook = checking.FromNotebook(CHAPTER, read_notebook(tmp_path / "x.ipynb"))
    disk_result = checking.trace_function(CONTRACT, from_notebook, [CASE], lambda _: None)
    messages = notes(live_result, disk_result, uses(function))
    assert len(messages) == bool(difference) and difference in "".join(messages), messages

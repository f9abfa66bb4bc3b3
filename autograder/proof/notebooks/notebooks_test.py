"""A notebook is judged the same in the kernel, by the command and officially: the table of ``rows.txt``."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from autograder.checking.judging import LOCAL, executor
from autograder.contract.task import load
from autograder.contract.verdict import PASS
from autograder.grading.inside.intake import Notebook
from autograder.grading.inside.tracing import Problem
from autograder.grading.outside.judge import _run, plan
from autograder.grading.outside.kernel_and_file import same
from autograder.grading.outside.pipeline import LIMITS, trace_request, traced_by
from autograder.grading.outside.sandbox import best_level
from autograder.grading.outside.workers import TRACER, local_tracer, local_worker, sandboxed
from autograder.proof.notebooks import CHAPTER, TASK, read_rows

ROWS = read_rows()
CONTRACT = load(CHAPTER).task(TASK)
CASE = next(case for case in CONTRACT.cases if "forward alone" in case.name)
FULL = bool(os.environ.get("MESHCRAFT_FULL"))


@pytest.fixture(scope="module")
def looks():
    """The ways to check a notebook, by name: each returns the same as ``traced_by``."""
    workers = {
        "kernel": local_worker("autograder.proof.notebooks.kernel", greets=False, seconds=60),
        "official": sandboxed(TRACER, CHAPTER, best_level(), greets=False, seconds=60),
        "file": local_tracer(CHAPTER, 60),
    }

    def look(method, cells):
        limits = LIMITS if method == "official" else LOCAL
        request = trace_request(CHAPTER, CONTRACT, Notebook(cells, ""), [CASE], limits)
        return traced_by(workers[method], request)

    for worker in workers.values():
        worker.start_early()
    yield look
    for worker in workers.values():
        worker.close()


@pytest.fixture(scope="module")
def is_right(looks):
    """Judge a Program of the one case by its values; most are identical to one that is known to be right."""
    known = looks("file", next(row for row in ROWS if row.name == "nothing but a constant").cells)

    def right(program):
        if same(program, known.programs[CASE.name]) and program is not known.programs[CASE.name]:
            return True
        planned = plan(CHAPTER, CONTRACT).first
        evidence = _run(planned, CASE, {CASE.name: program.serialise()}, "", executor().ask)
        return all(np.array_equal(evidence.measured[name], expected) for name, expected in evidence.expected.items())

    assert right(known.programs[CASE.name])
    return right


# Rows that once lost all points come first; a plain run checks every sixth of the others.
CHOSEN = ROWS if FULL else [*ROWS[:28], *ROWS[28::6]]


def test_there_are_about_two_hundred_ways_and_each_has_a_name_of_its_own():
    assert len({row.name for row in ROWS}) == len(ROWS) >= 200


@pytest.mark.parametrize("row", CHOSEN, ids=[row.name for row in CHOSEN])
def test_kernel_file_and_official_grade_give_the_same(looks, is_right, row):
    methods = ("kernel", "official", "file") if FULL or ROWS.index(row) % 8 == 0 else ("kernel", "official")
    with ThreadPoolExecutor() as pool:
        traces = dict(zip(methods, pool.map(lambda method: looks(method, row.cells), methods), strict=True))
    official = traces["official"]
    if isinstance(official, Problem):
        assert official.verdict == row.verdict, official
        assert {trace.verdict for trace in traces.values() if isinstance(trace, Problem)} == {row.verdict}, traces
        assert all(isinstance(trace, Problem) for trace in traces.values()), traces
        return
    for method, trace in traces.items():
        assert not isinstance(trace, Problem), (method, trace)
        assert same(trace.programs[CASE.name], official.programs[CASE.name]), method
    assert is_right(official.programs[CASE.name]) == (row.verdict == PASS)

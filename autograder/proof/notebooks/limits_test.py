"""A learner's experiments alongside the exercise cost no points; the graded function's own resource use has limits."""

import ast
from dataclasses import replace

import pytest

from autograder.checking.judging import LOCAL
from autograder.contract.task import load
from autograder.grading.inside import running
from autograder.grading.inside.cells import plain_python, read_statements
from autograder.grading.inside.intake import Cell, Notebook, read_notebook
from autograder.grading.inside.running import run_cells
from autograder.grading.inside.slicing import needed
from autograder.grading.inside.tracing import Problem, Traced
from autograder.grading.outside.notebook_options import lab_code
from autograder.grading.outside.pipeline import LIMITS, trace_request, traced_by
from autograder.grading.outside.sandbox import best_level
from autograder.grading.outside.workers import TRACER, sandboxed
from autograder.proof.notebooks import ANSWER, CHAPTER, HEAD, TASK
from course.curriculum import CHAPTERS, ROOT

CONTRACT = load(CHAPTER).task(TASK)
CASE = next(case for case in CONTRACT.cases if "forward alone" in case.name)


def cells(*sources):
    return [Cell(f"cell-{number}", source) for number, source in enumerate(sources)]


@pytest.fixture(scope="module")
def official():
    with_limits = replace(LIMITS, cpu_s=20, wall_s=40.0)
    worker = sandboxed(TRACER, CHAPTER, best_level(), greets=False, seconds=60)

    def look(*sources, task=CONTRACT):
        notebook = Notebook(tuple(cells(HEAD, *sources)), "")
        return traced_by(worker, trace_request(CHAPTER, task, notebook, [CASE], with_limits))

    yield look
    worker.close()


@pytest.mark.long
@pytest.mark.parametrize(
    "experiment",
    [
        "import os\nos._exit(0)",
        "import ctypes\nctypes.string_at(0)",
        "import os\nos.abort()",
        "hoard = [bytearray(2**30) for _ in range(8)]",
        "for n in range(2**30):\n    print('x' * 100_000)",
        "import sys\nsys.stdout.close()",
        "import threading\nthreading.Thread(target=threading.Event().wait).start()",
        "import signal\nsignal.alarm(1)",
        "while True:\n    try:\n        raise SystemExit\n    except SystemExit:\n        break",
    ],
)
def test_an_experiment_that_ends_the_process_costs_nothing(official, experiment):
    assert isinstance(official("ONE = 1", ANSWER, experiment), Traced)


def test_an_experiment_may_take_its_time_and_then_is_ended(monkeypatch):
    monkeypatch.setattr(running, "STATEMENT_SECONDS", 0.2)
    monkeypatch.setattr(running, "WALL_RATIO", 1000)
    loop = "while True:\n    pass"
    ran = run_cells(
        cells("ONE = 1", loop, loop, loop, "TWO = 2", "ONE -= 0", "def f():\n    return ONE"), ["f"], patience=0.3
    )
    assert ran.namespace["f"]() == 1 and "TWO" not in ran.namespace and ran.left_out == 2
    messages = [str(failure) for failure in ran.failures]
    assert len(messages) == 4 and "(cell-1:" in messages[0] and "longer than 0.2 s of processor time" in messages[0]
    assert "was skipped: f does not need it" in messages[-1]


def test_what_waits_for_ever_is_ended_too(monkeypatch):
    monkeypatch.setattr(running, "STATEMENT_SECONDS", 0.1)
    ran = run_cells(cells("import time\ntime.sleep(1000)", "def f():\n    pass"), ["f"])
    assert callable(ran.namespace["f"]) and "longer than 0.3 s" in str(ran.failures[0])


def test_what_is_needed_and_never_ends_is_told_with_its_line(monkeypatch):
    monkeypatch.setattr(running, "NEEDED_SECONDS", 0.2)
    ran = run_cells(cells("ONE = 1\nwhile ONE:\n    ONE += 1", "def f():\n    return ONE"), ["f"])
    (failure,) = ran.failures
    assert failure.problem.verdict == "limit_exceeded" and failure.problem.line.startswith("cell-0:")


def test_an_end_that_comes_between_two_steps_of_the_event_loop_is_an_end(monkeypatch):
    monkeypatch.setattr(running, "STATEMENT_SECONDS", 0.05)
    for _ in range(20):
        ran = run_cells(
            cells("import asyncio", "ONE = 1\nwhile ONE:\n    await asyncio.sleep(0)", "def f():\n    return ONE"),
            ["f"],
        )
        assert [failure.problem.verdict for failure in ran.failures] == ["limit_exceeded"]


@pytest.mark.parametrize(
    ("sources", "wanted"),
    [
        (["a = 1", "b = a", "c = 2", "def f(): return b"], {0, 1, 3}),
        (["a = []", "a.append(1)", "b = []", "b.append(1)", "def f(): return a"], {0, 1, 4}),
        (["a = []", "b = a", "b.append(1)", "def f(): return a"], {0, 2, 3}),
        (["a = {}", "for n in range(3):\n    a[n] = n", "def f(): return a"], {0, 1, 2}),
        (["class A: pass", "A.x = 1", "for c in (A,):\n    c.y = 2", "def f(): return A"], {0, 1, 2, 3}),
        (["def g():\n    global a\n    a = 1", "g()", "def f(): return a"], {0, 1, 2}),
        (["def h(): g()", "def g():\n    global a\n    a = 1", "h()", "print(1)", "def f(): return a"], {0, 1, 2, 4}),
        (["def train(step): pass", "losses = train(f)", "def f(): return 1"], {2}),
        (["import jax", "jax.devices()", "jax.config.update('x', 1)", "def f(): return jax"], {0, 2, 3}),
        (["exec('a = 1')", "def f(): return a"], {0, 1}),
        (["from math import *", "def f(): return 1"], {0, 1}),
        (["def f(x): x = x.size; return x", "size = 3", "x = 4"], {0}),
        (["a = 1", "def f(n=a): return n", "del a", "b = 2"], {0, 1, 2}),
        (["def g(): return 1", "@g\ndef f(): pass", "h = f"], {0, 1}),
        (["x = 1", "[y := n for n in range(x)]", "def f(): return y"], {0, 1, 2}),
    ],
)
def test_what_a_function_needs(sources, wanted):
    needed_numbers = needed(read_statements(cells(*sources)), ["f"])
    assert wanted <= needed_numbers and needed_numbers - wanted <= {
        number for number, s in enumerate(sources) if s.startswith("b = a")
    }


@pytest.mark.parametrize("chapter", [entry.name for entry in CHAPTERS])
def test_the_lab_of_a_release_is_known_and_no_function_needs_it(chapter):
    own = running.lab_statements(lab_code(chapter))
    statements = read_statements(read_notebook(ROOT / "exercises" / chapter / f"{chapter}.ipynb").cells)
    lab_numbers = {
        number for number, statement in enumerate(statements) if statement.node and ast.dump(statement.node) in own
    }
    assert {ast.dump(statement.node) for statement in statements if statement.node} >= own
    for task in load(chapter).tasks:
        assert not needed(statements, [task.name]) & lab_numbers, task.name


@pytest.mark.parametrize("theirs", ["def helper(a, b): return 2", "class helper: pass", "helper = 3", "import helper"])
def test_the_lab_rebinds_no_name_of_the_learners(theirs):
    def value_of_f(*sources):
        ran = run_cells(cells(*sources, "def f(): return helper()"), ["f"], lab=(theirs,))
        return ran.namespace["f"]()

    mine = "def helper(): return 1"
    assert value_of_f(mine, theirs) == value_of_f(theirs, mine) == value_of_f(mine, theirs, "x = 2") == 1
    with pytest.raises((TypeError, NameError, AssertionError)):
        assert value_of_f(theirs) == 1


def test_an_earlier_edition_of_the_lab_is_no_cause_of_a_wrong_function():
    lab = ("wide_specs = 1 / 0", "shown = wide_specs")
    sources = ("LOG = []", "def f(): LOG.extend([]); return 1", lab[0], "LOG.append(wide_specs)")
    wrong = Problem("fail", "another form")
    assert run_cells(cells(*sources), ["f"], lab=lab).explained(wrong, "f") == wrong
    mine = run_cells(cells(*sources, "LOG.append(1 / 0)"), ["f"], lab=lab)
    assert "division" in mine.explained(wrong, "f").message


@pytest.mark.parametrize(
    "source",
    [
        "x = 5 % 3\ny = 1\n",
        "%%time\nx = 1\n1 / 0",
        "!ls \\\n  -l\nx = 1\n1 / 0",
        "\n\n\nx = 1\n1 / 0",
        "%%capture\n%%time\n\nx = 1\n1 / 0",
        "?len\nlen?\nx = 1\n1 / 0",
        "for n in range(2):\n    !ls \\\n      -l\n    x = n\n1 / 0",
    ],
)
def test_lines_stay_what_they_were(source):
    plain, _ = plain_python(source)
    assert len(plain.rstrip("\n").split("\n")) == len(source.rstrip("\n").split("\n"))
    ran = run_cells(cells(source), ["f"])
    lines = [failure.problem.line for failure in ran.failures]
    assert lines == ([f"cell-0:{len(source.split(chr(10)))}"] if "1 / 0" in source else [])


def test_a_repeated_cell_id_points_at_its_own_line():
    twice = [Cell("same", "x = 1"), Cell("same", "\n\n1 / 0")]
    assert run_cells(twice, ["f"]).failures[0].problem.line == "same:3"


def test_a_missing_name_quotes_the_statement_that_should_have_bound_it(official):
    outcome = official("\nONE = math.sqrt(-1)", ANSWER)
    assert isinstance(outcome, Problem) and outcome.verdict == "student_error"
    assert "(before it, `ONE = math.sqrt(-1)` (cell-1:2) failed: ValueError: math domain error)" in outcome.message
    missing = official(ANSWER)
    assert isinstance(missing, Problem) and "no cell of the notebook defines ONE" in missing.message
    assert "autograder.check" not in outcome.message + missing.message


def test_a_mistake_is_not_blamed_on_a_cell_that_comes_after_it(official):
    outcome = official("def ring_all_gather(x, axis_name:\n    pass", "check(ring_all_gather)")
    assert isinstance(outcome, Problem) and "SyntaxError" in outcome.message and "before it" not in outcome.message


def test_a_byte_order_mark_is_no_mistake(official):
    assert isinstance(official("ONE = 1", "\ufeff" + ANSWER), Traced)


def test_a_mistake_after_which_statements_were_left_out_is_still_told():
    slow = "import time\nbegin = time.process_time()\nwhile time.process_time() < begin + 0.2: pass"
    ran = run_cells(cells(slow, "x = 1", "f = 1 / 0"), ["f"], patience=0.1)
    problem = ran.function(CONTRACT.wrapping)
    assert isinstance(problem, Problem)
    early = run_cells(cells("def f():\n    1 / 0", "f()", slow, "x = 1", "y = 2"), ["f"], patience=0.1)
    assert early.left_out == 2 and "ZeroDivisionError" in early.explained(early.failures[0].problem, "f").message
    late = early.explained(Problem("student_error", "KeyError: 'x'"), "f")
    assert "2 statements were skipped, from cell-3:1 on" in late.message


@pytest.mark.parametrize(
    "odd", ["f.__wrapped__ = f", "class Odd:\n    def __getattr__(self, name):\n        while True: pass\nf = Odd()"]
)
def test_a_function_that_wraps_itself_or_never_answers_gets_an_ordinary_verdict(official, odd):
    outcome = official(f"def f(x, axis_name): return x\n{odd}\n{TASK} = f")
    assert isinstance(outcome, Traced) or outcome.verdict in ("student_error", "fail", "limit_exceeded")
    assert not isinstance(outcome, Problem) or "last words" not in outcome.message


def test_local_limits_are_wider():
    assert LOCAL.address_space > LIMITS.address_space

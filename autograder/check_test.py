"""``check`` on notebooks broken in every way a learner's can be: it reports a clear message and never crashes."""

import inspect
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import nbformat
import pytest

from autograder.chapters.mutant import patch
from autograder.check import check, check_notebook, check_solution
from autograder.checking import judging as checking
from autograder.checking import kernel
from autograder.checking.follow_up import blame_callee
from autograder.checking.judging import judge_function, plan_of_callee
from autograder.contract.task import every_task, find_task, load
from autograder.contract.verdict import (
    FAIL,
    LIMIT_EXCEEDED,
    PASS,
    REFUSED,
    STUDENT_ERROR,
    Fact,
    Kind,
    Report,
    conclude,
)
from autograder.grading.inside.intake import IntakeError
from autograder.grading.outside.judge import plan
from autograder.learner.compiled import CompiledFacts
from autograder.proof.demo.__main__ import HERE as DEMO
from course.curriculum import ROOT
from solutions import data_parallel
from solutions import fsdp as solutions_fsdp

EXERCISE = ROOT / "exercises" / "fsdp" / "fsdp.ipynb"
RIGHT = DEMO / "submitted" / "right" / "fsdp" / "fsdp.ipynb"
HEAD = "import jax\nfrom jax import lax\nfrom jax.sharding import PartitionSpec as P\n"


@pytest.fixture
def notebook(tmp_path):
    def write(*cells, name="fsdp.ipynb"):
        made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        for cell, word in zip(made.cells, ("one", "two", "three"), strict=False):
            cell.id = word
        nbformat.write(made, tmp_path / name)
        return tmp_path / name

    return write


def judged(path, function="shard_params"):
    (result,) = check_notebook(path, "fsdp", [function]).functions
    return result


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{not json", "is not JSON"),
        (b"[1, 2]", "no list of cells"),
        (b'{"cells": [3]}', "cell 1 is not a cell"),
        (b'{"cells": [{"cell_type": "code", "source": 7}]}', "source of cell 1 is not text"),
        (b"[" * 100_000, "is not JSON"),
        (b" " * 9_000_000, "at most 8,388,608"),
    ],
)
def test_file_that_is_no_notebook_is_an_error_that_says_so(tmp_path, content, message):
    path = tmp_path / "fsdp.ipynb"
    path.write_bytes(content)
    with pytest.raises(IntakeError, match=message):
        check_notebook(path, "fsdp")
    assert path.read_bytes() == content


def test_missing_and_linked_notebooks_are_errors(tmp_path):
    with pytest.raises(IntakeError, match="No such file"):
        check_notebook(tmp_path / "fsdp.ipynb", "fsdp")
    (tmp_path / "link.ipynb").symlink_to(EXERCISE)
    with pytest.raises(IntakeError, match="is a link"):
        check_notebook(tmp_path / "link.ipynb", "fsdp")


def test_notebook_without_the_function_says_what_is_run(notebook):
    result = judged(notebook("x = 1"))
    assert (result.verdict, result.points) == (STUDENT_ERROR, 0)
    assert "no function shard_params(params, axis_name, min_size)" in result.message


def test_function_with_another_signature_is_told_the_right_one(notebook):
    result = judged(notebook("def shard_params(params, min_size):\n    return params"))
    assert result.verdict == FAIL
    assert result.facts[0].message.startswith(
        "shard_params takes (params, min_size), expected (params, axis_name, min_size)"
    )
    assert result.facts[0].line == "one:1"


RETURNS = "return {}, jax.tree.map(lambda _: {}, params)"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return params", "returned a dict, expected a tuple"),
        ("pass", "returned None (is a return missing?)"),
        ("return {**params, 'more': 1}, params", "missing: none; unknown: more"),
        ("return [1], params", "shards: measured a list, expected a tree of dicts"),
        ("return params, params", "its spec is float32"),
        (RETURNS.format("params", "P('model')"), "names ['model']; the axis to split over is 'data'"),
        (
            "here = lax.axis_index(axis_name)\n    "
            + RETURNS.format("jax.tree.map(lambda x: x * here.astype(x.dtype), params)", "P()"),
            "differs from device to device over data",
        ),
        (
            RETURNS.format("jax.tree.map(lambda x: x[None], params)", "P()"),
            "measured float32[1, 8, 8], expected float32[8, 8]",
        ),
    ],
)
def test_result_of_another_form_is_told_what_was_given_and_expected(notebook, body, message):
    result = judged(notebook(HEAD, f"def shard_params(params, axis_name, min_size):\n    {body}"))
    assert (result.verdict, result.points) == (FAIL, 0)
    assert message in next(fact.message for fact in result.facts if fact.passed is False)


def test_a_shape_that_broadcasting_made_is_said_to_be_that(notebook):
    body = "jax.tree.map(lambda x: x + jax.numpy.zeros((2, *(1 for _ in x.shape))), params)"
    cells = HEAD, f"def shard_params(params, axis_name, min_size):\n    {RETURNS.format(body, 'P()')}"
    (fact, *_) = judged(notebook(*cells)).facts
    assert "broadcasting gave it [2, 8, 8], since arrays whose shapes differ" in fact.message


def test_exception_is_the_learners_own_line(notebook):
    result = judged(notebook(HEAD, "def shard_params(params, axis_name, min_size):\n    x = 1\n    return params / x"))
    assert (result.verdict, result.line) == (STUDENT_ERROR, "two:3")
    assert result.message.startswith("TypeError: unsupported operand")


def test_an_error_in_the_first_case_names_the_page_and_a_hint_and_a_stub_neither(notebook):
    broken = "def shard_params(params, axis_name, min_size):\n    return params / 2"
    (heading, hint, *_) = check_notebook(notebook(HEAD, broken), "fsdp", ["shard_params"]).notes
    assert heading == 'shard_params: to read on, `meshcraft site fsdp "Which leaves, and along which dim"`'
    assert hint == "shard_params: where to look, `meshcraft hint fsdp shard_params`"
    other_form = "def shard_params(params, axis_name, min_size):\n    return params"
    assert check_notebook(notebook(HEAD, other_form), "fsdp", ["shard_params"]).notes[:2] == (heading, hint)
    assert check_notebook(EXERCISE, "fsdp", ["shard_params"]).notes == ()


def test_an_error_in_a_later_case_with_the_same_mesh_says_where_it_runs(notebook):
    body = "if lax.axis_size(axis_name) != 8:\n        raise ValueError('no')\n    "
    cells = HEAD, f"def shard_params(params, axis_name, min_size):\n    {body}{RETURNS.format('params', 'P()')}"
    message = judged(notebook(*cells)).message
    assert (
        message.startswith("ValueError: no (on mesh ") and "; on mesh data=8 it runs). On mesh data=8 it is" in message
    )


def test_a_stopped_function_stays_as_it_is_whatever_is_added(notebook):
    never: Any = SimpleNamespace(notes=(), exports=lambda task: [], facts=None)
    (result,) = check_notebook(notebook("x = 1"), "fsdp", ["fsdp_loss"], more=[never]).functions
    assert (result.verdict, result.facts) == (STUDENT_ERROR, ())


def test_cells_run_once_for_all_functions_and_all_platforms(tmp_path):
    log = tmp_path / "runs"
    made = nbformat.read(RIGHT, as_version=4)
    made.cells.insert(0, nbformat.v4.new_code_cell(f"open({str(log)!r}, 'a').write('x')"))
    path = tmp_path / "fsdp.ipynb"
    nbformat.write(made, path)
    names = ("shard_params", "gather_params", "fsdp_loss")
    report = check_notebook(path, "fsdp", [*names], more=[CompiledFacts("fsdp")])
    assert log.read_text() == "x"
    assert [result.verdict for result in report.functions] == [PASS] * 3
    assert any(fact.name == "overlap" for fact in report.functions[2].facts)


def test_a_function_that_ends_the_process_takes_no_other_with_it(notebook):
    ends = "import os\ndef gather_params(shards, specs, axis_name):\n    os._exit(1)"
    report = check_notebook(notebook(HEAD, ends, solution("shard_params")), "fsdp", ["gather_params", "shard_params"])
    assert [result.verdict for result in report.functions] == [STUDENT_ERROR, PASS]


def test_a_failed_statement_is_named_only_to_functions_that_need_it(notebook):
    uses = "def gather_params(shards, specs, axis_name):\n    return scale\n"
    other = "def shard_params(params, axis_name, min_size):\n    return params / 2"
    report = check_notebook(notebook("scale = 1 / 0", uses, other), "fsdp", ["gather_params", "shard_params"])
    gather, shard = (result.message for result in report.functions)
    assert "`scale = 1 / 0` (one:1) failed" in gather and "TypeError" in shard and "scale" not in shard


def test_syntax_error_and_missing_name_are_explained(notebook):
    result = judged(notebook("def shard_params(:\n  pass"))
    assert (result.message.split(":")[0], result.line) == ("SyntaxError", "one:1")
    late = "def shard_params(params, axis_name, min_size):\n    return params, answer"
    assert "no cell of the notebook defines answer" in judged(notebook("pass", late)).message
    problem = judged(notebook("x = 1\nanswer = x / 0", late)).message
    assert "(before it, `answer = x / 0` (one:2) failed with ZeroDivisionError: division by zero)" in problem


def test_magics_and_broken_imports_do_not_matter_to_those_who_do_not_use_them(notebook):
    head = "%matplotlib inline\n!ls\nimport nosuchmodule\n" + HEAD
    result = judged(notebook(head, "%%time\nnot python", solution("shard_params")))
    assert result.verdict == PASS


def solution(name):
    return inspect.getsource(getattr(solutions_fsdp, name)).replace("PyTree", "object")


def test_python_callback_is_refused_with_the_remedy(notebook):
    body = "def shard_params(params, axis_name, min_size):\n    jax.debug.print('{}', params['scale'])\n"
    result = judged(notebook(HEAD, body + "    return params, jax.tree.map(lambda _: P(), params)"))
    assert result.verdict == REFUSED
    assert "jax.debug.print" in result.message


def test_data_dependent_branch_is_refused_at_its_line(notebook):
    cell = (
        "def shard_params(params, axis_name, min_size):\n"
        "    double = lambda x: lax.cond(x.sum() > 0, lambda: x, lambda: 2 * x)\n"
        "    return jax.tree.map(double, params), jax.tree.map(lambda _: P(), params)"
    )
    result = judged(notebook(HEAD, cell))
    assert result.verdict == REFUSED
    assert result.message.startswith("case in lax.cond: which branch runs depends on data")
    assert (result.line, result.quoted[result.line][:8]) == ("two:2", "double =")


def test_program_that_never_ends_is_stopped_and_the_next_check_works(monkeypatch):
    def shard_params(params, axis_name, min_size):
        """Devices wait for each other in different branches."""
        from jax import lax
        from jax.sharding import PartitionSpec as P

        def endless(x):
            return lax.fori_loop(0, 900_000, lambda i, x: lax.fori_loop(0, 900_000, lambda j, x: x * 1.0001, x), x)

        return jax.tree.map(endless, params), jax.tree.map(lambda _: P(), params)

    task = load("fsdp").task("shard_params")
    monkeypatch.setattr(checking.executor(), "seconds", 4)
    result = judge_function(plan("fsdp", task), shard_params, lambda _: None)[0]
    assert result.verdict == LIMIT_EXCEEDED
    assert "longer than 4 s" in result.message
    monkeypatch.setattr(checking.executor(), "seconds", 120)
    from solutions.fsdp import shard_params as right

    assert judge_function(plan("fsdp", task), right, lambda _: None)[0].verdict == PASS


def test_python_that_never_ends_is_stopped_at_its_line(notebook, monkeypatch):
    monkeypatch.setattr(checking, "TRACE_SECONDS", 1)
    result = judged(notebook("def shard_params(params, axis_name, min_size):\n    while True:\n        pass"))
    assert (result.verdict, result.line.partition(":")[0]) == (LIMIT_EXCEEDED, "one")
    assert "s of processor time; does a loop ever end?" in result.message


@pytest.mark.parametrize("module", ["autograder.chapters.fsdp.tasks", "course.training", "solutions.fsdp"])
def test_a_notebook_can_import_what_official_grading_can_and_no_more(notebook, module):
    here = notebook(
        HEAD, f"def shard_params(params, axis_name, min_size):\n    import {module}\n    return params, params"
    )
    result = judged(here)
    assert result.verdict == STUDENT_ERROR and f"No module named '{module}'" in result.message, result


def test_tracing_is_limited_in_processor_time_and_what_waits_in_wall_time(monkeypatch):
    def judged_here(body):
        task = load("fsdp").task("shard_params")
        space = {}
        exec(f"import time\ndef shard_params(params, axis_name, min_size):\n    {body}", space)
        return judge_function(plan("fsdp", task), space["shard_params"], lambda _: None)[0]

    monkeypatch.setattr(checking, "TRACE_SECONDS", 1)
    assert "longer to trace than 1 s of processor time" in judged_here("while True: pass").message
    monkeypatch.setattr(checking, "TRACE_WALL_SECONDS", 2)
    result = judged_here("time.sleep(60)")
    assert result.verdict == LIMIT_EXCEEDED and "2 s, in which it computed for 0 s" in result.message


def test_a_solution_that_falls_short_in_a_line_of_the_course_is_a_verdict(monkeypatch):
    failed = Fact("sent", Kind.COMMUNICATION, False, 2, 1, message="too many", line="course/mesh.py:3")
    report = Report("fsdp", (conclude("shard_params", 2, [failed]),))
    monkeypatch.setattr("autograder.check._judged", lambda *_: report)
    assert check_solution("fsdp", ["shard_params"]).functions[0].missed == report.functions[0].missed


def test_outcome_is_a_number_to_nbgrader_a_table_to_people_and_text_elsewhere():
    from solutions.fsdp import shard_params

    outcome = check(shard_params)
    bundle = outcome._repr_mimebundle_()
    assert bundle["text/plain"] == "2.0"
    assert "state bytes per device" in bundle["text/html"]
    assert "state bytes per device" in repr(outcome)


def test_check_of_an_unknown_function_lists_what_there_is():
    with pytest.raises(LookupError, match=r"check knows: .*shard_params, gather_params, fsdp_loss"):
        check(solution)


def test_a_function_is_known_by_what_the_notebook_calls_it():
    space = {"check": check, "solution": solution}
    for definition in ("lambda *args: solution('shard_params')(*args)", "type('Object', (), {'__call__': len})()"):
        exec(f"shard_params = {definition}\nfound = check(shard_params)", space)
        assert [result.name for result in space["found"].report.functions] == ["shard_params"]


def test_a_cell_that_failed_is_named_where_an_older_function_is_judged(monkeypatch):
    space = {"check": check}
    exec(compile("def gather_params(shards, specs, axis_name):\n    return shards", "<one>", "exec"), space)
    cells = ["", "def gather_params(shards, specs, axis_name):\n    return shards", "def gather_params(:\n    return 1"]
    shell = SimpleNamespace(compile=SimpleNamespace(_filename_map={"<one>": 1}), user_ns={"In": cells, **space})
    monkeypatch.setattr(kernel, "get_ipython", lambda: shell)
    exec("found = check(gather_params)", space)
    message = space["found"].report.functions[0].message
    assert message.startswith("This judges gather_params as In[1] had it. In[2], which defines it again, does not run")
    assert "SyntaxError" in message and "`def gather_params(:`" in message


def test_live_function_that_differs_from_the_notebook_is_noted(tmp_path, monkeypatch):
    content = json.loads(EXERCISE.read_text())
    path = tmp_path / "fsdp.ipynb"
    path.write_text(json.dumps(content))
    monkeypatch.setenv("JPY_SESSION_NAME", str(path))
    from solutions.fsdp import shard_params

    assert "Save it" in check(shard_params).report.notes[0]


# A pass is a pass


def planned_for(function):
    chapter, task = find_task(function)
    return task, plan(chapter, task, stretched=True), plan(chapter, task, stretched=True, secret=b"s" * 32)


def test_a_check_judges_all_that_grading_does_but_for_the_case_that_is_drawn():
    for function in every_task():
        _, ours, official = planned_for(function)
        assert [case.name for case in official.cases] == [*(case.name for case in ours.cases), "unseen"], function
        assert set(ours.first.cases) < set(ours.cases) and ours.at_scale == official.at_scale, function


LATER = {  # wrong over `pipe`, with one layer, on an axis of size 1
    data_parallel.fold_key_over_axes: {
        "for name in axis_names:": "for name in [n for n in axis_names if n != 'pipe']:"
    },
    data_parallel.overlapped_gradients: {
        "first = lax.psum(waiting, axis_name)": (
            "first = jax.tree.map(lambda g: g if len(inputs) > 1 else 0 * g, lax.psum(waiting, axis_name))"
        )
    },
    solutions_fsdp.fsdp_loss: {
        "### BEGIN SOLUTION": "batch = jax.tree.map(lambda rows: rows[:: 2 - (lax.axis_size(axis_name) > 1)], batch)"
    },
}


@pytest.mark.parametrize("function", LATER, ids=lambda function: function.__name__)
def test_an_answer_that_is_right_on_the_first_cases_alone_does_not_pass(function):
    _, planned, _ = planned_for(function.__name__)
    mistaken = patch(function, "wrong in a later case", LATER[function]).function
    progress = []
    result, _ = judge_function(planned, mistaken, lambda _: None, progress.append)
    assert (result.verdict, result.points) == (FAIL, 0), result.message
    assert any("; now " in text for text in progress), "it fell short on the first cases already"
    assert judge_function(planned.first, mistaken, lambda _: None)[0].verdict == PASS


def test_a_function_that_falls_short_names_the_callee_that_does_so_by_itself():
    right, short = Fact("values", Kind.VALUES, True), Fact("permute bytes", Kind.COMMUNICATION, False)
    caller, callee = (conclude(name, 4, [right, short]) for name in ("cp_transformer_step", "ring_attention"))
    used = {"ring_attention": "", "layer_with": ""}
    found = blame_callee("context_parallel", caller, used, lambda _: callee)
    assert found.points == caller.points and "ring_attention, which cp_transformer_step calls" in found.message
    assert "falls short of “permute bytes” by itself" in found.message
    honest = conclude("ring_attention", 4, [right])
    assert blame_callee("context_parallel", caller, used, lambda _: honest) == caller


def test_what_will_run_is_compiled_while_the_next_cases_are_traced_and_a_failure_of_that_is_no_verdict(monkeypatch):
    worker, asked = checking.executor(), []
    ask = worker.ask

    def refuse_to_compile(header, blobs):
        asked.append(header["do"])
        if header["do"] == "compile":
            raise checking.Stopped(LIMIT_EXCEEDED, "it took too long")
        return ask(header, blobs)

    monkeypatch.setattr(worker, "ask", refuse_to_compile)
    planned = plan("fsdp", load("fsdp").task("gather_params"))
    result, _ = judge_function(planned, solutions_fsdp.gather_params, lambda _: None)
    assert result.verdict == PASS and asked.count("run") == len(planned.cases)
    assert 0 < asked.count("compile") <= len(planned.cases)


def test_a_callee_is_judged_on_as_few_cases_as_can_show_what_it_lacks():
    task = load("context_parallel").task("ring_attention")
    assert task.at_scale is not None
    right = Fact("values", Kind.VALUES, True)

    def planned(name, kind):
        caller = conclude("cp_transformer_step", 4, [right, Fact("some", kind, False, case=name)])
        return plan_of_callee("context_parallel", task, replace(caller, cases=("one", "two")))

    scaled, first, later = planned("one", Kind.MEMORY), planned("one", Kind.VALUES), planned("two", Kind.VALUES)
    names = {case.name for case in scaled.cases}
    assert (
        scaled.at_scale == task.at_scale[0]
        and task.at_scale[1] in names
        and {case.name for case in later.cases} <= names
    )
    assert first.at_scale is later.at_scale is None and len(first.cases) == 1 < len(later.cases)


def test_a_callee_that_is_right_is_not_blamed_for_what_no_case_shows():
    from solutions.async_tensor_parallel import ring_gather_matmul

    partial = conclude(
        "async_tp_mlp", 4, [Fact("values", Kind.VALUES, True), Fact("time", Kind.TIME, False, case="one")]
    )
    task = load("async_tensor_parallel").task("ring_gather_matmul")
    planned = plan_of_callee("async_tensor_parallel", task, replace(partial, cases=("one",)))
    assert not judge_function(planned, ring_gather_matmul, lambda _: None)[0].missed

"""``check`` on notebooks broken in every way a learner's can be: it reports a clear message and never crashes."""

import inspect
import json
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest

from autograder.check import check, check_notebook, check_solution
from autograder.checking import judging as checking
from autograder.checking import kernel
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
from autograder.learner.compiled import CompiledFacts
from autograder.proof.demo.__main__ import HERE as DEMO
from course.curriculum import ROOT
from solutions import fsdp as solutions_fsdp

EXERCISE = ROOT / "exercises" / "fsdp" / "fsdp.ipynb"
RIGHT = DEMO / "submitted" / "right" / "fsdp" / "fsdp.ipynb"
HEAD = "import jax\nfrom jax import lax\nfrom jax.sharding import PartitionSpec as P\n"


@pytest.fixture
def notebook(tmp_path):
    def write(*cells, name="fsdp.ipynb"):
        document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        for cell, word in zip(document.cells, ("one", "two", "three"), strict=False):
            cell.id = word
        nbformat.write(document, tmp_path / name)
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


def test_a_message_about_another_signature_gives_the_right_one(notebook):
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
        ("return [1], params", "shards: measured a list of 1, expected a tree of dicts"),
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
def test_a_message_about_another_form_gives_the_measured_and_the_expected_one(notebook, body, message):
    result = judged(notebook(HEAD, f"def shard_params(params, axis_name, min_size):\n    {body}"))
    assert (result.verdict, result.points) == (FAIL, 0)
    assert message in next(fact.message for fact in result.facts if fact.passed is False)


def test_a_message_says_that_broadcasting_caused_a_shape(notebook):
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
    assert heading == 'Read more about shard_params: `meshcraft site fsdp "Which leaves, and along which dim"`'
    assert hint == "Hints for shard_params: `meshcraft hint fsdp shard_params`"
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


@pytest.mark.long
def test_cells_run_once_for_all_functions_and_all_platforms(tmp_path):
    log = tmp_path / "runs"
    document = nbformat.read(RIGHT, as_version=4)
    document.cells.insert(0, nbformat.v4.new_code_cell(f"open({str(log)!r}, 'a').write('x')"))
    path = tmp_path / "fsdp.ipynb"
    nbformat.write(document, path)
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
    assert "(before it, `answer = x / 0` (one:2) failed: ZeroDivisionError: division by zero)" in problem


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("import helpers as answer", "failed: No module named 'helpers': a notebook is judged with the packages"),
        ("answer = open('table.json').read()", "failed: the file 'table.json' cannot be read: a notebook is judged"),
        ("answer = __import__('urllib.request').request.urlopen('http://localhost:1')", "judged without a network"),
    ],
)
def test_what_a_notebook_lacks_where_it_is_judged_is_explained(notebook, statement, reason):
    function = "def shard_params(params, axis_name, min_size):\n    return params, answer"
    message = judged(notebook(statement, function)).message
    assert message.startswith("answer is not defined (NameError) (before it, ") and reason in message


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


def test_python_that_never_ends_is_stopped_at_its_line(notebook, monkeypatch):
    monkeypatch.setattr(checking, "TRACE_SECONDS", 1)
    result = judged(notebook("def shard_params(params, axis_name, min_size):\n    while True:\n        pass"))
    assert (result.verdict, result.line.partition(":")[0]) == (LIMIT_EXCEEDED, "one")
    assert "s of processor time; does a loop ever end?" in result.message


@pytest.mark.parametrize(
    "module", ["autograder.chapters.fsdp.tasks", "course.attention", "course.training", "solutions.fsdp"]
)
def test_a_notebook_can_import_what_official_grading_can_and_no_more(notebook, module):
    path = notebook(
        HEAD, f"def shard_params(params, axis_name, min_size):\n    import {module}\n    return params, params"
    )
    result = judged(path)
    assert result.verdict == STUDENT_ERROR and f"No module named '{module}'" in result.message, result


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
    assert message.startswith("This judges gather_params as defined in In[1]. In[2], which redefines it, does not run")
    assert "SyntaxError" in message and "`def gather_params(:`" in message


def test_live_function_that_differs_from_the_notebook_is_noted(tmp_path, monkeypatch):
    content = json.loads(EXERCISE.read_text())
    path = tmp_path / "fsdp.ipynb"
    path.write_text(json.dumps(content))
    monkeypatch.setenv("JPY_SESSION_NAME", str(path))
    from solutions.fsdp import shard_params

    assert "Save it" in check(shard_params).report.notes[0]

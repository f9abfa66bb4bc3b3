"""Official grading does not trust a submission's process: forged, broken and endless responses are told apart."""

import errno
import inspect
import io
import os
from dataclasses import asdict, replace
from functools import partial

import nbformat
import pytest

from autograder.contract.task import load
from autograder.contract.verdict import LIMIT_EXCEEDED, NEEDS_HUMAN, PASS, REFUSED, STUDENT_ERROR, Result
from autograder.grading.inside import wire
from autograder.grading.inside.executor import Executor, answered
from autograder.grading.inside.intake import read_notebook
from autograder.grading.inside.messages import Ending
from autograder.grading.inside.tracing import Traced, describe_error, limit_of, trace_cases
from autograder.grading.outside import pipeline
from autograder.grading.outside.judge import expected, judge, plan
from autograder.grading.outside.pipeline import LIMITS, Grader, read_result
from autograder.grading.outside.sandbox import best_level
from solutions.fsdp import shard_params

TASK = load("fsdp").task("shard_params")
QUIET = {"exceeded": "", "signal": None, "exit_status": 0, "cpu_s": 1.0, "output": ""}


def message(header, blobs=()):
    stream = io.BytesIO()
    wire.write(stream, header, list(blobs))
    return stream.getvalue()


# The tracer's responses


@pytest.mark.parametrize(
    ("ending", "result", "verdict", "says"),
    [
        ({"exceeded": "wall time"}, b"", LIMIT_EXCEEDED, "longer than 180 s"),
        ({"exceeded": "output"}, b"", LIMIT_EXCEEDED, "printed more than 16 MiB"),
        ({"exceeded": "result size"}, b"x", LIMIT_EXCEEDED, "limit on result size"),
        ({"signal": 24, "cpu_s": 60.0}, b"", LIMIT_EXCEEDED, "60 s of processor time"),
        ({"signal": 9, "cpu_s": 60.9}, b"", LIMIT_EXCEEDED, "60 s of processor time"),
        ({"signal": 6, "output": "terminate called: std::bad_alloc"}, b"", LIMIT_EXCEEDED, "more memory"),
        ({"signal": 6, "output": "LLVM: pthread_create failed: x\n @ 0x7ff2"}, b"", LIMIT_EXCEEDED, "and threads"),
        ({"signal": 11}, b"", STUDENT_ERROR, "crashed with signal 11"),
        ({"exit_status": 0, "output": "bye\n"}, b"", STUDENT_ERROR, "its last words: bye"),
        ({}, message({"problem": {"verdict": "pass", "message": "trust me"}}), REFUSED, "trust me"),
        ({}, message({"problem": {"verdict": "needs_human", "message": ""}}), REFUSED, ""),
    ],
)
def test_process_without_programs_gets_the_verdict_that_fits(ending, result, verdict, says):
    problem = read_result(Ending(**{**QUIET, **ending}), result, LIMITS)[0].problem
    assert problem and problem.verdict == verdict and says in problem.message


@pytest.mark.parametrize(
    ("error", "limit"),
    [
        (MemoryError(), "address space"),
        (OSError(errno.EMFILE, "Too many open files"), "open files"),
        (OSError(errno.EFBIG, "File too large"), "file size"),
        (RuntimeError("can't start new thread"), "processes and threads"),
        (FileNotFoundError(errno.ENOENT, "No such file"), ""),
        (ValueError("out of range"), ""),
    ],
)
def test_an_exception_names_the_limit_that_it_is_about(error, limit):
    assert limit_of(error, str(error)) == limit
    assert describe_error(error, lambda _: None).verdict == (LIMIT_EXCEEDED if limit else STUDENT_ERROR)


@pytest.mark.parametrize(
    "result",
    [
        b"\x00\x00\x00\x04nope",
        b"\xff\xff\xff\xff",
        message({"problem": 7}),
        message({"problem": {"verdict": "pass", "message": ["trust", "me"]}}),
        message({"ran": 1, "left_out": "many"}),
        message({"cases": ["a", "b"]}, [b"one"]),
        message({"cases": [1]}, [b"one"]),
        message({"cases": "a"}, [b"one"]),
        message({}),
    ],
)
def test_invalid_bytes_raise_a_wire_error(result):
    with pytest.raises(wire.WireError):
        read_result(Ending(**QUIET), result, LIMITS)


# The judge's inputs


@pytest.fixture(scope="module")
def honest():
    planned = plan("fsdp", TASK).first
    traced = trace_cases(TASK, shard_params, planned.traced, lambda _: None)
    assert isinstance(traced, Traced)
    return planned, traced.programs


def judged(planned, programs):
    whole = {name: p if isinstance(p, bytes) else p.serialise() for name, p in programs.items()}
    return judge(planned, whole, "", partial(answered, Executor()))


def test_programs_that_differ_in_lines_alone_are_compiled_once(honest):
    planned, programs = honest
    moved = trace_cases(TASK, shard_params, planned.traced, lambda _: "moved")
    assert isinstance(moved, Traced)
    name, program = next(iter(programs.items()))
    other = moved.programs[name]
    assert program.artefact != other.artefact
    executor = Executor()
    description, blobs = wire.pack(expected(planned, planned.cases[0])[0])
    request = {"do": "run", "inputs": description}
    answers = [executor.serve(request, [version.serialise(), *blobs])[1] for version in (program, other)]
    assert len(executor.compiled) == 1 and answers[0] == answers[1]


def test_honest_programs_pass_and_official_grading_keeps_what_they_do(honest):
    planned, programs = honest
    result, official_result = judged(planned, programs), judged(replace(planned, official=True), programs)
    assert result.verdict == official_result.verdict == PASS and len(official_result.form) == 16
    assert result.form == "" and Result.from_json(official_result.to_json()) == official_result


def change(name, **fields):
    return lambda programs: {**programs, name: replace(programs[name], **fields)}


FIRST, SECOND = (case.name for case in plan("fsdp", TASK).first.cases)


@pytest.mark.parametrize(
    ("forge", "reason"),
    [
        (lambda p: {FIRST: p[FIRST]}, "there is no Program for"),
        (lambda p: {FIRST: p[FIRST], SECOND: p[FIRST]}, "is for mesh"),
        (lambda p: {FIRST: b"MESHCRAFT", SECOND: p[SECOND]}, "does not begin as one"),
        (change(FIRST, platform="cuda"), "is for platform 'cuda'"),
        (lambda p: change(FIRST, inputs=p[FIRST].inputs[1:])(p), "takes"),
        (lambda p: change(FIRST, outputs=p[FIRST].outputs[1:])(p), "number of outputs"),
        (lambda p: change(FIRST, outputs=p[FIRST].outputs[::-1])(p), "and the signature one of"),
        (lambda p: change(FIRST, artefact=p[FIRST].artefact[:-50])(p), "cannot be read"),
        (lambda p: change(FIRST, artefact=p[SECOND].artefact)(p), "number of devices"),
    ],
)
def test_forged_programs_are_refused_with_the_reason(honest, forge, reason):
    planned, programs = honest
    result = judged(planned, forge(programs))
    assert (result.verdict, result.points) == (REFUSED, 0)
    assert reason in result.message


def test_inputs_follow_from_secret_and_submission_alone():
    first, same, *others = (
        plan("fsdp", TASK, secret=secret * 32, submission=submission)
        for secret, submission in ((b"a", "x"), (b"a", "x"), (b"b", "x"), (b"a", "y"))
    )
    assert first == same and len({first.seed, *(other.seed for other in others)}) == 3
    assert first.cases[-1].name == "unseen"
    assert plan("fsdp", TASK).cases[-1].name != "unseen"


# Real submissions in the real sandbox

ANSWER = inspect.getsource(shard_params)
HEAD = "import jax\nfrom jax import lax\nfrom jax.sharding import PartitionSpec as P\nPyTree = object"


def graded(grader, tmp_path, *cells):
    """The result of the first function of a submission with these cells."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbformat.write(notebook, tmp_path / "fsdp.ipynb")
    return grader.grade_task(TASK, read_notebook(tmp_path / "fsdp.ipynb"))


@pytest.fixture(scope="module")
def grader():
    with Grader("fsdp", secret=b"s" * 32, level=best_level()) as grader:
        yield grader


def test_a_child_that_is_killed_from_outside_is_traced_again_and_never_a_zero(grader, tmp_path, monkeypatch):
    requests, ask = [], grader.tracer.ask

    def killed(times):
        def answer(*request):
            requests.append(request)
            return ({**QUIET, "signal": 9}, [b""]) if len(requests) <= times else ask(*request)

        return answer

    monkeypatch.setattr(grader.tracer, "ask", killed(2))
    assert graded(grader, tmp_path, ANSWER).verdict != NEEDS_HUMAN
    monkeypatch.setattr(grader.tracer, "ask", killed(99))
    result = graded(grader, tmp_path, ANSWER)
    assert result.verdict == NEEDS_HUMAN and "killed from outside 3 times" in result.message


LOOKS = """
import ctypes, re
wanted, count = b"of-" + b"ada" * 7, 0
for line in open("/proc/self/maps"):
    if found := re.match("([0-9a-f]+)-([0-9a-f]+) rw", line):
        begin, end = (int(part, 16) for part in found.groups())
        for at in range(begin, end, 1 << 20):
            count += ctypes.string_at(at, min(1 << 20, end - at)).count(wanted)
def shard_params(params, axis_name, min_size):
    raise ValueError(f"found {count} times")
"""


@pytest.mark.long
def test_nothing_of_another_student_is_in_the_memory_that_a_submission_can_read(grader, tmp_path):
    def own(grader):  # occurrences of the text it searches for
        result = graded(grader, tmp_path, LOOKS)
        assert result.verdict == STUDENT_ERROR and "ValueError: found " in result.message
        return int(result.message.split("found ")[1].split()[0])

    marked = f"KEPT = 'of-{'ada' * 7}'\n" + "# filler of a long notebook\n" * 10_000 + ANSWER
    assert "found" not in graded(grader, tmp_path, marked).message
    after = own(grader)
    with Grader("fsdp", secret=b"s" * 32, level=grader.level) as fresh:
        assert own(fresh) == after <= 3


def test_an_executor_that_has_grown_is_replaced_before_the_next_submission(grader, tmp_path, monkeypatch):
    def executor_after():
        cells = [nbformat.v4.new_code_cell(cell) for cell in (HEAD, ANSWER)]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "fsdp.ipynb")
        assert grader.grade(tmp_path / "fsdp.ipynb", "ada").functions[0].verdict == PASS
        return grader.executor.process

    grader.executor.close()
    first = executor_after()
    assert executor_after() is first, "kept while it is small"
    assert grader.occupied > 100 << 20, "the executor can read its size in the sandbox"
    monkeypatch.setattr(pipeline, "KEPT_BYTES", grader.occupied // 2)
    assert executor_after() not in (None, first)


BASE = """
class Base:
    known = []
    def __init_subclass__(cls):
        Base.known.append(1)
"""


@pytest.mark.parametrize(
    "cells",
    [
        ["T = {}\nput = lambda k, v: T.__setitem__(k, v)", "put('one', 1)", "ONE = T['one']"],
        [f"{BASE}\nclass More(Base):\n    pass", "ONE = Base.known[0]"],
        ["with open('one.txt', 'w') as file:\n    file.write('1')", "ONE = int(open('one.txt').read())"],
    ][: None if os.environ.get("MESHCRAFT_FULL") else 2],
)
def test_cells_skipped_after_slow_experiments_run_on_the_retry(grader, tmp_path, monkeypatch, cells):
    monkeypatch.setattr(pipeline, "ALL_SECONDS", 0.1)
    slow = "import time\nbegin = time.process_time()\nwhile time.process_time() < begin + 0.3: pass"
    result = graded(grader, tmp_path, HEAD, slow, *cells, ANSWER.replace("< min_size", "< min_size * ONE"))
    assert result.verdict == PASS, result.message


def test_no_request_says_which_variant_is_asked():
    task = load("collectives").task("ring_all_gather")
    case = task.variants[0].of(task.cases[0])
    (sent_case,) = pipeline.trace_request("collectives", task, pipeline.Notebook((), ""), [case], LIMITS).cases
    assert case.sizes.order and sent_case["sizes"] == {n: s for n, s in asdict(case.sizes).items() if n != "order"}


START = "for _ in range(500): threading.Thread(target=time.sleep, args=(100,), daemon=True).start()"
FORGE = """class Forge:
    import sys
    frame = sys._getframe()
    while frame:
        if 'result' in frame.f_locals: frame.f_locals['result'].write(b'\\xff' * 100)
        frame = frame.f_back
    __import__('os')._exit(0)
"""


@pytest.mark.parametrize(
    ("cell", "verdict", "excerpt"),
    [
        ("class Exit:\n    __import__('os')._exit(0)", STUDENT_ERROR, "ended without a result"),
        ("class Loop:\n    while True: pass", LIMIT_EXCEEDED, "longer than 5 s"),
        ("class Crash:\n    __import__('ctypes').string_at(0)", STUDENT_ERROR, "crashed with signal 11"),
        ("class Bomb:\n    x = bytearray(1 << 40)", LIMIT_EXCEEDED, "limit on address space: MemoryError"),
        ("class Flood:\n    for _ in range(100000): print('x' * 1000)", LIMIT_EXCEEDED, "limit on output"),
        ("class Files:\n    kept = [open('/dev/null') for _ in range(999)]", LIMIT_EXCEEDED, "limit on open files"),
        ("class Large:\n    with open('/tmp/x', 'wb') as f: f.write(bytes(65 << 20))", LIMIT_EXCEEDED, "limit on "),
        (f"class Threads:\n    import threading, time\n    {START}", LIMIT_EXCEEDED, "limit on processes"),
        ("class Suicide:\n    import os\n    os.kill(os.getpid(), 9)", STUDENT_ERROR, "PermissionError"),
        ("class Quit:\n    raise SystemExit", STUDENT_ERROR, "SystemExit"),
        (FORGE, REFUSED, "invalid Programs"),
    ],
)
def test_hostile_cell_gets_its_verdict_and_the_next_submission_is_graded(
    grader, tmp_path, monkeypatch, cell, verdict, excerpt
):
    monkeypatch.setattr(grader, "limits", replace(LIMITS, wall_s=5.0))
    name = cell.split()[1].rstrip(":")
    uses_it = f"def shard_params(params, axis_name, min_size):\n    return {name}"
    result = graded(grader, tmp_path, cell, uses_it)
    assert (result.verdict, result.points) == (verdict, 0)
    assert excerpt in result.message
    monkeypatch.setattr(grader, "limits", LIMITS)
    assert graded(grader, tmp_path, HEAD, ANSWER).verdict == PASS

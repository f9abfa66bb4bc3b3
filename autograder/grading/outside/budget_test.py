"""A submission has a budget: hanging code is ended soon, and honest functions of the same submission are judged."""

import io
import json
import os
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest

from autograder.contract.task import load
from autograder.contract.verdict import LIMIT_EXCEEDED, NEEDS_HUMAN
from autograder.grading.inside import executor, launch, wire
from autograder.grading.inside.launch import Limits
from autograder.grading.outside import pipeline
from autograder.grading.outside.judge import Stopped
from autograder.grading.outside.pipeline import AFTER_A_HANG, SUBMISSION, Budget, Grader
from autograder.grading.outside.workers import Worker

LIMITS = Limits(wall_s=100.0, cpu_s=60)


def test_a_hang_lowers_the_limits_of_the_others_and_an_empty_budget_says_so(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(pipeline.time, "monotonic", lambda: clock[0])
    budget = Budget(LIMITS)
    assert budget.limits() == LIMITS
    clock[0] = 30.0
    budget.spend(0.0, 20.0)
    assert (budget.wall_s, budget.cpu_s) == (SUBMISSION * 100.0 - 30, SUBMISSION * 60 - 20)
    budget.hung = True
    assert (budget.limits().wall_s, budget.limits().cpu_s) == (100 * AFTER_A_HANG, 60 * AFTER_A_HANG)
    budget.cpu_s = 15.0
    assert budget.limits().cpu_s == 15
    budget.spend(30.0, "what no process may say")
    budget.cpu_s = 9.0
    with pytest.raises(Stopped, match=r"all functions of a submission have 600 s, or 360 s of processor time") as ended:
        budget.limits()
    assert ended.value.verdict == LIMIT_EXCEEDED


def test_a_submission_whose_every_function_hangs_ends_within_its_budget(monkeypatch):
    cpu_limits = []

    class Hangs:
        def __init__(self, *_, **__):
            pass

        def ask(self, header, blobs):
            cpu_limits.append(json.loads(blobs[0])["limits"]["cpu_s"])
            ending = {"exceeded": "", "signal": 24, "exit_status": None, "cpu_s": float(cpu_limits[-1]), "clean": True}
            return {**ending, "output": ""}, [b""]

        def close(self):
            pass

    monkeypatch.setattr(pipeline, "sandboxed", Hangs)
    with Grader("fsdp", secret=b"s" * 32, level="none", limits=LIMITS) as grader:
        monkeypatch.setattr(grader, "contract", SimpleNamespace(tasks=load("fsdp").tasks * 3))
        report = grader.grade_notebook(pipeline.Notebook((), ""), "eve")
    assert {result.verdict for result in report.functions} == {LIMIT_EXCEEDED} and len(report.functions) == 15
    assert cpu_limits[:2] == [60, 40] and sum(cpu_limits) <= SUBMISSION * 60
    assert "too little of it was left for this one" in report.functions[-1].message


class EndsAtItsLimit:
    """A tracer whose every child uses up its processor time."""

    def __init__(self, *_, **__):
        pass

    def ask(self, header, blobs):
        used = float(json.loads(blobs[0])["limits"]["cpu_s"])
        ending = {"exceeded": "", "signal": 24, "exit_status": None, "cpu_s": used, "clean": True}
        return {**ending, "output": ""}, [b""]

    def close(self):
        pass


def test_a_function_beyond_the_courses_budget_needs_a_person_and_one_that_hangs_does_not(monkeypatch):
    monkeypatch.setattr(pipeline, "sandboxed", EndsAtItsLimit)
    options = {"secret": b"s" * 32, "level": "none", "limits": LIMITS, "budget": 110}
    with Grader("fsdp", **options, ungraded=("gather_params",)) as grader:
        report = grader.grade_notebook(pipeline.Notebook((), ""), "eve")
    verdicts = {result.name: result.verdict for result in report.functions}
    assert [*verdicts] == ["shard_params", "fsdp_loss", "fsdp_train_step", "hybrid_shard_step"]
    assert [*verdicts.values()] == [LIMIT_EXCEEDED] * 2 + [NEEDS_HUMAN] * 2, (
        "60 s, two thirds of it, and then 10 s are left"
    )
    assert "the course's budget of 110 processor seconds" in report.functions[-1].message
    assert "give its points by hand, or raise the budget" in report.functions[-1].message


def test_a_process_that_computes_nothing_is_ended_and_one_that_computes_or_rests_is_not():
    looks = round(launch.STALL_S / launch.LOOK_S) + 1
    watch = executor.Watch()
    assert {watch.look(1.0) for _ in range(2 * looks)} == {0}, "it is serving no request"
    with watch.request(None):
        assert {watch.look(1.0) for _ in range(looks - 2)} == {0}
        assert watch.look(1.5) == 0
        assert [watch.look(1.5) for _ in range(looks - 1)][-1] == wire.STALLED
    with watch.request(-1.0):
        assert watch.look(10**9) == wire.CPU_USED_UP


DEADLOCK = """
    import course, jax, jax.numpy as jnp
    from jax.sharding import PartitionSpec as P
    from autograder.grading.inside import executor
    from course.mesh import make_mesh

    def only_some(x):
        here = jax.lax.axis_index("data") == 0
        return jax.lax.cond(here, lambda x: jax.lax.psum(x, "data"), lambda x: x, x)

    executor.STALL_S = 0.5
    step = jax.jit(jax.shard_map(only_some, mesh=make_mesh({"data": 8}), in_specs=P("data"), out_specs=P("data"),
                                 check_vma=False))
    executor.Executor.serve = lambda *_: ({"sum": float(step(jnp.ones(8))[0])}, [])
    executor.main()
"""


class Process:
    """A Python program in the role of a worker's process."""

    def __init__(self, program):
        command, pipes = (
            [sys.executable, "-c", textwrap.dedent(program)],
            dict.fromkeys(("stdin", "stdout"), subprocess.PIPE),
        )
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL, **pipes)
        self.stdin, self.stdout, self.stderr_tail = self.process.stdin, self.process.stdout, ""

    def wait(self, timeout=None):
        return self.process.wait(timeout)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        self.kill()
        for pipe in filter(None, (self.stdin, self.stdout)):
            pipe.close()


def test_a_deadlock_of_devices_ends_long_before_its_deadline_and_is_tried_twice():
    started = []
    worker = Worker(lambda: started.append(1) or Process(DEADLOCK), greets=True, seconds=600)
    with pytest.raises(Stopped, match="a collective that not every device takes part in") as ended:
        worker.ask({"do": "run"})
    assert (ended.value.verdict, len(started)) == (LIMIT_EXCEEDED, 2)


def test_a_program_that_stalls_once_is_run_again_and_costs_nothing():
    greeting = "from autograder.grading.inside import wire; import sys; wire.write(sys.stdout.buffer, {'ready': True})"
    programs = [DEADLOCK, f"{greeting}\n{textwrap.dedent(ECHO)}"]
    worker = Worker(lambda: Process(programs.pop(0)), greets=True, seconds=600)
    assert worker.ask({"do": "run"})[0] == {"do": "run", "cpu_s": None}
    worker.close()
    assert programs == []


CHILD = """
    import sys, time
    from autograder.grading.inside import jailed_child
    from autograder.grading.inside.launch import Limits

    def computes(result):
        while time.process_time() < 1.0:
            pass

    jailed_child.STALL_S = 0.4
    does = computes if sys.argv[1] == "computes" else lambda result: time.sleep(600)
    print(jailed_child.fork_confined(does, limits=Limits(wall_s=None, cpu_s=None)).exceeded)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads another process's clock, which only Linux allows")
@pytest.mark.parametrize(("does", "exceeded"), [("sleeps", "waiting"), ("computes", "")])
def test_a_child_that_sleeps_is_ended_and_one_that_computes_is_not(monkeypatch, does, exceeded):
    monkeypatch.setenv("MESHCRAFT_LEVEL", "unsafe-local")
    command = [sys.executable, "-c", textwrap.dedent(CHILD), does]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert process.stdout.strip() == exceeded


ECHO = """
    import sys
    from autograder.grading.inside import wire

    while True:
        wire.write(sys.stdout.buffer, wire.read(sys.stdin.buffer)[0])
"""


def test_an_interrupted_request_leaves_no_answer_for_the_next_one(monkeypatch):
    worker = Worker(lambda: Process(ECHO), greets=False, seconds=60)
    assert worker.ask({"number": 1})[0]["number"] == 1

    def interrupted(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(wire, "read", interrupted)
        worker.ask({"number": 2})
    assert worker.ask({"number": 3})[0]["number"] == 3
    worker.close()


class SlowToEnd:
    """Closes its output immediately when ended, and its files a moment later, as a real process may."""

    def __init__(self):
        self.stdin = io.BytesIO()
        reading, self.writing = os.pipe()
        self.stdout = os.fdopen(reading, "rb")
        self.ended, self.ending = False, False

    def kill(self):
        if not self.ending:
            self.ending = True
            os.close(self.writing)
            time.sleep(0.2)
            self.ended = True

    close = kill

    def wait(self, timeout=None):
        return 0

    @property
    def stderr_tail(self):
        assert self.ended, "read while the process was being ended"
        return "last words"


def test_a_process_that_is_ended_at_its_deadline_is_left_alone_until_it_has_ended():
    process = SlowToEnd()
    worker = Worker(lambda: process, greets=False, seconds=0.1)
    with process.stdout, pytest.raises(Stopped, match=r"took longer than 0\.1 s") as stopped:
        worker.ask({"do": "run"})
    assert stopped.value.verdict == LIMIT_EXCEEDED

"""The facts that ``check --aot`` adds: the GPU compiler's figures on a function, as advice."""

from dataclasses import replace

import jax.numpy as jnp
import pytest
from jax import lax

from autograder.chapters.fsdp.mutants import MUTANTS
from autograder.check import check_solution
from autograder.contract.task import load, references, trace
from autograder.grading.inside.tracing import Problem, TooLong
from autograder.learner import compiled
from autograder.learner.compiled import EXPOSED, NAMES, CompiledFacts, compiled_facts
from course.machines import machine
from course.program.compiled import GpuReport, compile_for, plugin
from course.program.compiled.collectives import GpuCollective
from course.program.compiled.replay import Replay
from course.program.compiled.report import GpuMemory
from solutions import data_parallel, fsdp, transformer_3d

NOT_MEASURED = (None, "not measured")
TASK = load("fsdp").task("fsdp_loss")
NAIVE = next(mutant.function for mutant in MUTANTS if (mutant.task, mutant.name) == (TASK.name, TASK.naive_memory))


def installed():
    try:
        plugin.find_plugin()
    except plugin.AotMissing as error:
        return str(error)
    return ""


@pytest.mark.long
@pytest.mark.skipif(bool(installed()), reason=installed())
def test_the_compiler_sees_that_the_naive_version_keeps_every_weight():
    facts = {fact.name: fact for fact in compiled_facts("fsdp", TASK, NAIVE, lambda _: None)}
    assert list(facts) == list(NAMES)
    assert facts["compiled program"].passed
    assert facts["overlap"].unit_text == "of collectives in loops"
    assert facts["compiled temporaries"].passed is False
    assert all(fact.weight == 0 for fact in facts.values())


@pytest.mark.long
@pytest.mark.skipif(bool(installed()), reason=installed())
def test_what_a_single_tick_computes_again_is_not_kept(monkeypatch):
    task = load("transformer_3d").task("forward_3d")
    assert task.at_scale
    small = dict(num_microbatches=1, num_layers=6, num_repeats=6, rows=4, width=64, hidden=256, vocab=64)
    small |= dict(num_heads=4, seq=256, max_seq=256)
    like, mesh = task.at_scale[0], {"data": 1, "pipe": 1, "tensor": 1}
    case = replace(like.with_sizes(**small), mesh=mesh)

    def temporaries():
        program = trace(task, transformer_3d.forward_3d, case, lambda _: None, "cuda")
        return compile_for(program, machine("8xH100")).memory.temporaries

    with_barrier = temporaries()
    monkeypatch.setattr(lax, "optimization_barrier", lambda operand: operand)
    assert 1.5 * with_barrier < temporaries()


@pytest.mark.long
def test_without_the_compiler_nothing_is_measured_and_no_point_is_lost(monkeypatch, tmp_path):
    monkeypatch.setattr(plugin, "own_folder", lambda: tmp_path)
    report = check_solution("fsdp", ["fsdp_loss"], more=[CompiledFacts("fsdp")])
    added = report.functions[0].facts[-len(NAMES) :]
    assert [(fact.name, fact.passed, fact.measured) for fact in added] == [(name, *NOT_MEASURED) for name in NAMES]
    assert "pip install" in added[0].message
    assert report.passed and report.points == report.max_points


def test_a_program_that_differs_between_platforms_is_reported_and_not_compiled(monkeypatch):
    def never(*_):
        raise AssertionError("it was compiled")

    def one_product_more(loss):  # and one in the backward pass
        return jnp.full((2, 2), loss) @ jnp.full((2, 2), 0.5)

    def branches(shards, specs, batch, model, axis_name):
        loss = fsdp.fsdp_loss(shards, specs, batch, model, axis_name)
        return lax.platform_dependent(loss, cpu=lambda x: x, cuda=lambda x: one_product_more(x)[0, 0])

    monkeypatch.setattr(compiled, "compile_all", never)
    first, *others = compiled_facts("fsdp", TASK, branches, lambda _: None)
    assert (first.name, first.passed, first.weight) == ("compiled program", False, 0)
    assert "products of f32[2, 2] and f32[2, 2] written: 0 for CPUs, 2 for GPUs" in first.message
    assert [(fact.name, fact.passed, fact.measured) for fact in others] == [(name, *NOT_MEASURED) for name in NAMES[1:]]


def raises_the_second_time(error):
    """Export for CPUs and raise in the export for GPUs."""
    calls = []

    def fsdp_loss(shards, specs, batch, model, axis_name):
        calls.append(1)
        if len(calls) > 1:
            raise error
        return fsdp.fsdp_loss(shards, specs, batch, model, axis_name)

    return fsdp_loss


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (raises_the_second_time(TypeError("no")), "cannot be exported for cuda: TypeError: no (cell:"),
        (raises_the_second_time(SystemExit("bye")), "cannot be exported for cuda: SystemExit: bye (cell:"),
        (raises_the_second_time(TooLong("60 s")), "took longer to trace than 60 s"),
        (Problem("student_error", "there is no function"), "there is no function"),
    ],
)
def test_what_cannot_be_exported_is_not_measured_and_says_why(function, reason):
    facts = compiled_facts("fsdp", TASK, function, lambda file: "cell" if file == __file__ else None)
    assert [(fact.name, fact.passed, fact.measured) for fact in facts] == [(name, *NOT_MEASURED) for name in NAMES]
    assert all(reason in fact.message for fact in facts)


def compiled_with(exposed, spans):
    """A report in which all-reduces of 1 MB leave this many seconds exposed."""
    sent = GpuCollective("all_reduce", ("data",), 8, 10**6, 11, True, spans, True, "cell:3")
    replay = Replay("8xA5000", 1.0, 0.9, 0.8, {"data": exposed})
    return GpuReport("8xA5000", {"data": 8}, {}, {}, GpuMemory(1, 1, 1, 0, 0), (sent,), replay)


@pytest.mark.long
@pytest.mark.parametrize(("share", "spans", "passed"), [(0.36, False, False), (0.34, False, True), (0.1, True, True)])
def test_exposed_time_of_the_compiled_schedule_has_the_timelines_limit_as_advice(monkeypatch, share, spans, passed):
    task = load("data_parallel").task("overlapped_gradients")
    naive = references("data_parallel")[task.name]["exposed"]["naive"]
    reports = [compiled_with(share * naive, spans), compiled_with(0.1 * naive, True)]
    monkeypatch.setattr(compiled, "compile_all", lambda *_: reports)
    facts = compiled_facts("data_parallel", task, data_parallel.overlapped_gradients, lambda _: None)
    assert [fact.name for fact in facts] == [*NAMES, EXPOSED]
    fact = facts[-1]
    assert (fact.passed, fact.weight) == (passed, 0)
    assert passed is not ("all-reduce of 1 MB runs 11 times without overlapping a matmul" in fact.message)
    assert fact.line == ("" if passed else "cell:3")
    monkeypatch.setattr(compiled, "references", lambda _: {})
    assert compiled_facts("data_parallel", task, data_parallel.overlapped_gradients, lambda _: None)[-1].passed is None

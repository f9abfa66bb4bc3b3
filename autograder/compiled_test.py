"""What ``check --aot`` adds: the GPU compiler's word on a function, which is advice."""

import pytest

from autograder.check import check_solution
from autograder.compiled import NAMES, add_compiled, compiled_facts
from autograder.contract import load
from autograder.mutants.fsdp import MUTANTS
from course.program.compiled import plugin

TASK = load("fsdp").task("fsdp_loss")
NAIVE = next(mutant.function for mutant in MUTANTS if mutant.name == TASK.naive)


def installed():
    try:
        plugin.find_plugin()
    except plugin.AotMissing as error:
        return str(error)
    return ""


@pytest.mark.skipif(bool(installed()), reason=installed())
def test_the_compiler_sees_that_the_naive_version_keeps_every_weight():
    facts = {fact.name: fact for fact in compiled_facts("fsdp", TASK, NAIVE, lambda _: None)}
    assert list(facts) == list(NAMES)
    assert facts["compiled program"].passed
    assert facts["compiled temporaries"].passed is False
    assert all(fact.weight == 0 for fact in facts.values())


def test_without_the_compiler_nothing_is_measured_and_no_point_is_lost(monkeypatch, tmp_path):
    monkeypatch.setattr(plugin, "own_folder", lambda: tmp_path)
    before = check_solution("fsdp", ["fsdp_loss"])
    after = add_compiled(before, "fsdp", None)
    added = after.functions[0].facts[len(before.functions[0].facts) :]
    assert [(fact.passed, fact.measured) for fact in added] == [(None, "not measured")] * len(NAMES)
    assert "pip install" in added[0].message
    assert after.points == before.points

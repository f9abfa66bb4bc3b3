"""Measured facts: the plumbing on emulated devices, the facts from figures, and the messages without measurements."""

import json
from dataclasses import replace

import pytest

from autograder import cli
from autograder.checking.follow_up import with_facts
from autograder.checking.judging import FromNotebook
from autograder.contract.task import Case, load
from autograder.contract.verdict import PASS, Fact, Kind, Report, conclude
from autograder.grading.inside.intake import read_notebook
from autograder.learner import hardware_check
from autograder.learner.hardware_check import (
    MEMORY,
    SPEED,
    Bench,
    MeasuredFacts,
    measured_facts,
    measured_here,
    memory_fact,
    realistic_case,
    speed_fact,
)
from course.curriculum import ROOT
from course.measured.fresh import MeasurementFailed
from course.measured.memory import Peak
from course.measured.statistics import Comparison
from solutions import fsdp

TASK = load("fsdp").task("fsdp_loss")
GPU = {"platform": "gpu", "kind": "a GPU", "count": 1, "versions": {"jax": "0"}}
NONE = {"platform": "cpu", "kind": "cpu", "count": 8, "versions": {"jax": "0"}}


@pytest.mark.long
def test_plumbing_from_the_function_to_both_facts():
    small = Case("two devices", {"data": 2}, TASK.cases[0].sizes)
    task = replace(TASK, at_scale=(small, TASK.cases[0].name))
    speed, memory = measured_facts("fsdp", task, fsdp.fsdp_loss, lambda _: None, Bench({**NONE, "count": 2}, "cpu"))
    assert (speed.name, memory.name) == (SPEED, MEMORY)
    # The speed of an emulated mesh is meaningless: only test that there is a comparison.
    assert speed.limit == 1.15 and "(" in speed.measured_text, speed.message
    assert (memory.passed, memory.message) == (None, "this backend's memory_stats() has no peak")


@pytest.mark.parametrize(
    ("bench", "reason", "message"),
    [
        (Bench(NONE), "", "no GPUs that JAX can use here: it sees only cpu"),
        (Bench({**GPU, "count": 0}), "", "mesh data=1 needs 1 devices and 0 are present (a GPU)"),
        (Bench(GPU), "its values are wrong", "its values are wrong"),
    ],
)
def test_where_nothing_can_be_measured_both_facts_say_so_and_why(bench, reason, message):
    facts = measured_facts("fsdp", TASK, fsdp.fsdp_loss, lambda _: None, bench, reason)
    assert [(fact.name, fact.passed, fact.measured) for fact in facts] == [
        (SPEED, None, "not measured"),
        (MEMORY, None, "not measured"),
    ]
    assert all(message in fact.message for fact in facts)


def test_what_was_not_measured_costs_no_points():
    good = conclude("fsdp_loss", 5, [Fact("values", Kind.VALUES, True)])
    facts = measured_facts("fsdp", TASK, fsdp.fsdp_loss, lambda _: None, Bench(NONE))
    result = with_facts(good, facts)
    assert (result.points, result.verdict, len(result.facts)) == (5, PASS, 3)


def test_wrong_values_are_not_measured_and_a_note_names_the_devices(monkeypatch):
    monkeypatch.setattr(hardware_check, "survey", lambda: Bench(GPU))
    analysis = measured_here("fsdp")
    assert analysis.notes == ("measured on 1 x a GPU, jax 0",)
    wrong = conclude("fsdp_loss", 5, [Fact("values", Kind.VALUES, False, message="off")])
    facts = analysis.facts(TASK, wrong, fsdp.fsdp_loss, lambda _: None)
    assert [fact.passed for fact in facts] == [None, None] and "values are wrong" in facts[0].message


def test_without_a_process_to_ask_nothing_is_measured_and_a_note_says_why(monkeypatch):
    def fails():
        raise MeasurementFailed("no memory")

    monkeypatch.setattr(hardware_check, "survey", fails)
    analysis = measured_here("fsdp")
    assert analysis.notes == ("nothing was measured: no memory",) and analysis.exports(TASK) == []
    assert analysis.facts(TASK, conclude("fsdp_loss", 5, []), fsdp.fsdp_loss, lambda _: None) == []


def test_the_realistic_size_is_measured_on_the_largest_mesh_that_fits():
    assert TASK.at_scale
    large = TASK.at_scale[0]
    assert realistic_case(TASK, 8) == large
    single_device = realistic_case(TASK, 1)
    assert single_device == Case("data=1, width 4096", {"data": 1}, large.sizes)
    assert realistic_case(TASK, 7) == single_device and realistic_case(TASK, 0) is None


@pytest.mark.parametrize(
    ("outcome", "passed", "message"),
    [("pass", True, ""), ("fail", False, "1.300 times as long"), ("inconclusive", None, "does nothing else")],
)
def test_each_outcome_of_a_comparison_is_a_fact(outcome, passed, message):
    fact = speed_fact(Comparison(outcome, 1.3, 1.2, 1.4, 60, 1.15), "case")
    assert fact.passed is passed and message in fact.message and "1.300 (1.200 to 1.400)" in fact.measured_text


@pytest.mark.parametrize(
    ("measured", "reference", "passed", "shown"),
    [
        (Peak(110, 0), Peak(100, 0), True, "110"),
        (Peak(120, 0), Peak(100, 0), False, "120"),
        (None, Peak(100, 0), False, "does not fit"),
        (Peak(120, 0), Peak(None, None), None, "not measured"),
        (Peak(90, 90), Peak(100, 0), None, "not measured"),
        (Peak(90, 0), Peak(100, 100), None, "not measured"),
    ],
)
def test_two_peaks_make_a_fact_unless_compilation_hides_one(measured, reference, passed, shown):
    fact = memory_fact(measured, reference, "case")
    assert fact.passed is passed and fact.measured_text == shown
    assert bool(fact.message) == (passed is not True)


def test_a_program_that_cannot_be_exported_for_the_devices_is_not_measured(monkeypatch):
    def raises(*_):
        raise TypeError("no")

    facts = measured_facts(
        "fsdp", TASK, lambda shards, specs, batch, model, axis_name: raises(), lambda _: None, Bench(GPU)
    )
    assert all(fact.passed is None and "cannot be exported for cuda: TypeError: no" in fact.message for fact in facts)


def test_a_notebook_is_measured_as_it_stands_on_disk(monkeypatch):
    exercise = ROOT / "exercises" / "fsdp" / "fsdp.ipynb"
    source = FromNotebook("fsdp", read_notebook(exercise))
    good = conclude("fsdp_loss", 5, [Fact("values", Kind.VALUES, True)])
    facts = MeasuredFacts("fsdp", Bench(GPU)).facts(TASK, good, source, lambda _: None)
    assert "cannot be exported for cuda: fsdp_loss is not written yet" in facts[0].message


@pytest.mark.parametrize(("arguments", "real"), [([], 0), (["--mesh", "emulated"], 0), (["--mesh", "real"], 1)])
def test_only_a_real_mesh_adds_measured_facts(monkeypatch, capsys, arguments, real):
    analyses = []
    result = conclude("fsdp_loss", 5, [Fact("values", Kind.VALUES, True)])

    def check_solution(*_, more, **__):
        analyses.extend(more)
        return Report("fsdp", (result,))

    monkeypatch.setattr("autograder.check.check_solution", check_solution)
    monkeypatch.setattr(hardware_check, "survey", lambda: Bench(NONE))
    monkeypatch.setattr("sys.argv", ["meshcraft", "check", "fsdp", "--solution", "--json", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    (row,) = json.loads(capsys.readouterr().out)["functions"]
    assert len(analyses) == real and (row["points"], ended.value.code or 0) == (5, 0)

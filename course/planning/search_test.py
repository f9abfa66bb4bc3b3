"""The planner's search compared with brute force, and what it says about configurations that cannot run."""

import itertools
import time
from dataclasses import replace

import pytest

from course.machines import H100, machine, scaled
from course.planning import COURSE, DEFAULT, Choice, estimate, estimator, refusal
from course.planning.choices import Mesh
from course.planning.models import MODELS
from course.planning.planning_test import GPT, LARGE, PIPELINE, SIZES
from course.planning.search import Kind, choices, meshes, search
from course.sizes import Sizes


def test_every_mesh_and_every_configuration_of_it_is_listed_once():
    assert len(list(meshes(8))) == len(set(meshes(8))) == 10
    candidates = list(choices(SIZES, Mesh(2, 2, 2), 16, COURSE))
    assert len(candidates) == len(set(candidates)) == 4 * 3 * 2 * 2
    assert all(refusal(SIZES, 8, 16, choice, COURSE) == "" for choice in candidates)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": 4}, "data x pipe x tensor is 16, and there are 8 devices"),
        ({"data": 0}, "data is 0, and it must be a whole number of at least 1"),
        ({"pipe": 1, "tensor": 4, "data": 2.0}, "data is 2.0, and it must be a whole number"),
        ({"microbatches": 5}, "a share of 8 sequences cannot be taken in 5 microbatches"),
        ({"repeats": 3}, "4 layers on a stage cannot be taken in 3 repeats"),
        ({"data": 1, "pipe": 1, "tensor": 8}, "heads 4 cannot be split over tensor=8"),
        ({"remat": "some"}, "no remat is called 'some'; there are: none, attention, block"),
    ],
)
def test_configurations_that_cannot_be_placed_are_refused_with_the_reason(change, message):
    choice = Choice(2, 2, 2, 4, 2, "none", 3, "breadth_first")._replace(**change)
    assert message in refusal(SIZES, 8, 16, choice, COURSE)
    with pytest.raises(ValueError, match=r"is|cannot|called"):
        estimate(SIZES, H100, 16, choice, COURSE)


def test_the_best_is_the_fastest_that_fits_and_every_other_one_has_a_reason():
    target = machine("8xA5000")
    plans = search(LARGE, target, 16, COURSE)
    predict, estimates = estimator(LARGE, target, 16, COURSE), []
    numbers = range(1, 17)
    for mesh in itertools.product((1, 2, 4, 8), repeat=3):
        for rest in itertools.product(numbers, numbers, ("none", "block"), (0, 3)):
            choice = Choice._make((*mesh, *rest, "breadth_first", 1, 1))
            if refusal(LARGE, 8, 16, choice, COURSE) == "" and (mesh[0] > 1 or not choice.zero):
                estimates.append(predict(choice))
    fitting = [plan for plan in estimates if plan.fits]
    assert plans.best and plans.best.seconds == min(plan.seconds for plan in fitting)
    assert plans.count == len(estimates)
    kinds = [rejected.kind for rejected in plans.rejected]
    assert kinds.count(Kind.SLOWER) == len(fitting) - 1 and kinds.count(Kind.TOO_LARGE) == len(estimates) - len(fitting)
    assert all(rejected.reason and rejected.cause for rejected in plans.rejected)
    assert sum(map(len, plans.grouped().values())) == len(plans.rejected)


def test_a_mesh_that_a_model_cannot_be_placed_on_counts_once_and_has_a_reason():
    plans = search(replace(SIZES, heads=2), H100, 8)
    refused = [rejected for rejected in plans.rejected if rejected.kind == Kind.CANNOT]
    assert {rejected.mesh[:3] for rejected in refused} == {(1, 1, 8), (1, 2, 4), (2, 1, 4)}
    assert refused[0].cause == "heads 2 cannot be split over tensor"
    assert (
        list(plans.by_mesh())
        and plans.by_mesh()[Mesh(1, 1, 8)] is refused[[r.mesh for r in refused].index(Mesh(1, 1, 8))]
    )


def test_where_nothing_fits_there_is_no_best_and_the_smallest_comes_first():
    plans = search(replace(LARGE, layers=64, width=16_384, heads=128), machine("8xA5000"), 8)
    large = [rejected.estimate.bytes for rejected in plans.rejected if rejected.estimate]
    assert plans.best is None and large == sorted(large)
    assert {rejected.kind for rejected in plans.rejected} == {Kind.TOO_LARGE}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"repeats": 2}, "a pipeline of the schedule 1f1b has one repeat, and there are 2"),
        ({"schedule": "interleaved"}, "a pipeline of the schedule interleaved has several repeats, and there are 1"),
        ({"schedule": "zero_bubble", "remat": "block"}, "remat must be none, not block"),
        ({"schedule": "zero_bubble", "microbatches": 2}, "needs at least 4 microbatches, and there are 2"),
        ({"schedule": "gpipe"}, "no schedule is called 'gpipe'"),
        ({"zero": 4}, "no ZeRO stage is called 4"),
        ({"expert": 4, "pipe": 1}, "experts 1 cannot be split over expert=4"),
        ({"context": 4, "pipe": 1, "schedule": "breadth_first"}, "not for the course's own step"),
    ],
)
def test_a_schedule_that_cannot_run_a_configuration_is_refused_with_the_reason(change, message):
    assert message in refusal(SIZES, 4, 16, PIPELINE._replace(**change), DEFAULT)


def test_a_schedule_that_is_not_named_is_the_first_that_the_repeats_allow():
    names = [estimate(SIZES, scaled(H100, 4), 16, Choice(1, 4, 1, 16, r, "none")).choice.schedule for r in (1, 2)]
    assert names == ["1f1b", "interleaved"]


def test_the_search_considers_all_stages_of_zero_and_schedules():
    plans = search(SIZES, H100, 16, replace(DEFAULT, remats=("none",)))
    assert plans.best
    considered = [plans.best.choice, *(rejected.estimate.choice for rejected in plans.rejected if rejected.estimate)]
    assert {choice.zero for choice in considered} == {0, 1, 2, 3}
    assert {choice.schedule for choice in considered} == {"1f1b", "interleaved", "zero_bubble", "breadth_first"}
    assert len(considered) == len(set(considered))
    fixed = search(SIZES, H100, 16, replace(DEFAULT, zeros=(1,), schedules=("1f1b",)))
    assert {rejected.estimate.choice.zero for rejected in fixed.rejected if rejected.estimate} <= {0, 1}
    assert {rejected.estimate.choice.schedule for rejected in fixed.rejected if rejected.estimate} == {"1f1b"}


@pytest.mark.parametrize(("sizes", "batch"), [(Sizes(*GPT["1T"], 51_200, 2048), 4096), (MODELS["llama-3-405b"], 2048)])
def test_a_search_over_4096_devices_takes_seconds_and_a_configuration_less_than_a_millisecond(sizes, batch):
    began = time.process_time()
    plans = search(sizes, scaled(H100, 4096, 512), batch)
    took = time.process_time() - began
    assert plans.best and plans.count > 4000 and took < 5 and took / plans.count < 1e-3

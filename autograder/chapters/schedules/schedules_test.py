"""The contract of ``schedules``: executed tables compared with closed forms, orders, and the delayed recursion."""

from dataclasses import replace
from itertools import pairwise

import jax
import numpy as np
import pytest

from autograder.chapters.mutant import patch
from autograder.chapters.schedules import CONTRACT, orders, programs
from autograder.chapters.schedules.mutants import MUTANTS
from autograder.chapters.schedules.wrapping import Executed
from autograder.checking.judging import judge_function
from autograder.contract import value_tasks
from autograder.contract.task import Case
from autograder.contract.wrapping import trace
from autograder.grading.outside.judge import plan
from autograder.proof.central_differences import places
from course.machines import FREE_NETWORK
from course.program import bubble, costs, memory, parse, timeline
from course.schedules import LOOPED, bubble_form, family, tabulate
from solutions.schedules import execute_schedule, interleaved, one_f_one_b, zero_bubble

TASKS = {task.name: task for task in CONTRACT.tasks}
WIDTH, ROWS = 64, 16
NAMES = ("gpipe", "zero_bubble", "breadth_first", "interleaved", "1f1b")
SIZES = [
    (name, stages, count, repeats)
    for name in NAMES
    for stages in (4, 2, 8)
    for count in (stages, 2 * stages, 4 * stages)
    for repeats in ((2, 4) if name in ("interleaved", "breadth_first") else (1,))
]


def executed(name, stages, count, repeats=1):
    """The solution's program for a schedule of the family."""
    sizes = Executed(schedule=name, num_microbatches=count, num_repeats=repeats, rows=ROWS, width=WIDTH)
    task, case = TASKS["execute_schedule"], Case(name, {"pipe": stages}, sizes)
    return trace(task, execute_schedule, case, lambda *_: "")


@pytest.mark.parametrize("size", places(*SIZES, least=3) + ((SIZES[-1],) if len(places(*SIZES)) == 1 else ()), ids=str)
def test_the_bubble_of_the_program_is_that_of_the_closed_form(size):
    name, stages, count, repeats = size
    module = parse(executed(*size))
    unit, passes = 2 * ROWS * WIDTH**2, 3 * count * repeats
    seconds = timeline(module, FREE_NETWORK).seconds
    measured = bubble(passes * stages * unit / FREE_NETWORK.peak("f32"), stages, seconds)
    form = bubble_form(name, stages, count, repeats)
    assert form is not None
    assert costs(module).flops == passes * unit, "a device computes each pass once, and nothing else"
    assert measured == pytest.approx(form, rel=1e-6)


MESHES = ({"data": 2, "pipe": 3}, {"pipe": 4}, {"pipe": 2, "replica": 2}, {"stage": 1})
SCHEDULES_ON_MESHES = [
    (name, mesh) for mesh in MESHES for name in ("interleaved", "1f1b", "zero_bubble", "gpipe", "breadth_first")
]


@pytest.mark.parametrize(("name", "mesh"), places(*SCHEDULES_ON_MESHES, least=2), ids=str)
def test_every_executed_schedule_has_the_gradients_of_one_device_on_four_meshes(name, mesh):
    task = TASKS["execute_schedule"]
    sizes = Executed(schedule=name, num_microbatches=6, rows=2, width=5, num_repeats=2 if name in LOOPED else 1)
    if name == "interleaved":
        sizes = sizes.replace(num_microbatches=mesh.get("pipe", 1))
    alone = replace(task, cases=(Case(f"{name} on {mesh}", mesh, sizes, quick=True),), at_scale=None, core_facts=())
    result, _ = judge_function(plan("schedules", alone), execute_schedule, lambda *_: None)
    passed = {fact.name: fact.passed for fact in result.facts}
    assert passed["values"] and passed["gradients"] and passed["permute bytes"] and passed["other collectives"]


@pytest.mark.parametrize("size", places((4, 8), (2, 8), (4, 16), (8, 16)), ids=str)
def test_live_activations_of_the_programs_are_in_the_order_of_theory(size):
    temporaries = {}
    for name in ("1f1b", "zero_bubble", "gpipe"):
        program = executed(name, size[0], size[1])
        temporaries[name] = memory(parse(program), program).temporaries
    assert all(less < more for less, more in pairwise(temporaries.values())), temporaries
    assert temporaries["1f1b"] < 0.75 * temporaries["gpipe"], "M is at least 2 S"


@pytest.mark.parametrize("name", ["one_f_one_b", "interleaved", "zero_bubble"])
def test_orders_of_the_solution_are_those_of_the_page(name):
    task = TASKS[name]
    function = {"one_f_one_b": one_f_one_b, "interleaved": interleaved, "zero_bubble": zero_bubble}[name]
    for case in task.cases:
        for question in orders.questions(case):
            if not orders.refused(name, question):
                assert function(*question) == orders.lines_of(family(orders.ORDERS[name].name, *question))


@pytest.mark.parametrize("name", ["one_f_one_b", "interleaved", "zero_bubble"])
def test_no_message_about_a_wrong_order_has_a_right_line(name):
    task = TASKS[name]
    for mutant in (one for one in MUTANTS if one.task == name):
        for question in orders.questions(task.cases[0]):
            answer = value_tasks._formed(name, value_tasks.answer_or_refusal(mutant.function, *question), None)
            messages = [orders.problem(name, question, answer)]
            messages += (
                [] if messages[0] else [cost(name, question, answer) for cost in (orders.too_slow, orders.too_full)]
            )
            right = orders.known(name, question)
            if answer != right and isinstance(right, tuple):
                assert not any(line in message for line in right for message in messages)


def test_limits_of_an_order_are_what_the_family_needs_and_no_more():
    for name, order in orders.ORDERS.items():
        for case in TASKS[name].cases:
            for question in orders.questions(case):
                if orders.refused(name, question):
                    continue
                cost, repeats = orders.cost(orders.known(name, question)), (*question, 1)[2]
                stages, count = question[:2]
                if name != "zero_bubble" or count >= stages:
                    assert cost.time == pytest.approx(order.seconds(*question))
                in_flight = [round(most * repeats) for most in cost.activations]
                assert in_flight == [order.in_flight(stage, *question) for stage in range(stages)]


def test_gradients_of_the_delayed_recursion_equal_central_differences_at_the_older_weights():
    task = TASKS["two_weight_versions_step"]
    for case in task.cases[:3]:
        case = case.with_sizes(steps=1)
        inputs = task.draw(np.random.default_rng(0), case)
        gradients = task.oracle(inputs, case)["gradients"]
        for leaf, gradient in gradients.items():
            weights = inputs["versions"]["older"][leaf]
            place = np.unravel_index(np.argmax(np.abs(gradient[0])), weights.shape)
            losses, original = [], weights[place]
            for step in (1e-2, -1e-2):
                weights[place] = original + np.float32(step)
                losses.append(float(task.oracle(inputs, case)["values"]["loss"].mean()))
            weights[place] = original
            # Every pipeline's rows count alike, so the mean of their losses is the loss.
            assert gradient[0][place] == pytest.approx((losses[0] - losses[1]) / 2e-2, rel=2e-2), leaf


def test_the_delayed_recursion_subtracts_the_gradient_at_the_older_version():
    task = TASKS["two_weight_versions_step"]
    case = task.cases[0]
    inputs = task.draw(np.random.default_rng(1), case)
    state = inputs["versions"]
    for step in range(case.sizes.steps):
        batch = {name: inputs[name][step : step + 1] for name in ("microbatches", "targets")}
        result = task.oracle({**inputs, **batch, "versions": state}, case.with_sizes(steps=1))
        after = jax.tree.map(lambda leaf: leaf[0], result["values"]["versions"])
        for leaf, older in after["older"].items():
            np.testing.assert_array_equal(older, state["newest"][leaf])
            expected = state["newest"][leaf] - inputs["learning_rate"] * result["gradients"][leaf][0]
            np.testing.assert_allclose(after["newest"][leaf], expected, atol=1e-6)
        state = after
    whole = task.oracle(inputs, case)["values"]["versions"]
    for array, expected in zip(jax.tree.leaves(state), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(array, expected[0], atol=1e-6)


def test_slots_of_the_shape_of_a_microbatch_do_not_hold_what_a_stage_keeps():
    slots = "empty_slots(tree, table.num_slots[kind], like=example)"
    alike = "jax.tree.map(lambda _, n=table.num_slots[kind]: jnp.stack([0 * example] * n), tree)"
    task, wrong = TASKS["execute_schedule"], patch(execute_schedule, "keeps_microbatches", {slots: alike}).function
    with pytest.raises(ValueError, match="longer"):
        trace(task, wrong, task.complete(task.cases[0]), lambda *_: "")


def test_tables_of_the_cases_travel_as_plain_data():
    task = TASKS["execute_schedule"]
    for case in task.cases:
        sizes = case.sizes
        table = tabulate(family(sizes.schedule, programs.stages_of(case), sizes.num_microbatches, sizes.num_repeats))
        data = task.complete(case).given["table"]
        assert data["num_slots"] == table.num_slots and data["num_ticks"] == table.num_ticks
        assert all(data["columns"][name] == column.tolist() for name, column in table.columns.items())

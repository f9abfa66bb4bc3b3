"""The contract of ``collectives``: closed forms, limits, and messages for wrong answers."""

import math

import pytest
from jax.sharding import PartitionSpec as P

from autograder.chapters.collectives import CONTRACT
from autograder.chapters.collectives.puzzles import block_means, collective_means, copies_mean, questions, spec_means
from autograder.chapters.collectives.rings import CHUNKS_ALIVE, MEANING, bytes_form, chunk_bytes
from autograder.chapters.collectives.wrapping import Chunks, Questions
from autograder.contract import value_facts, value_tasks
from autograder.contract.case import Sizes
from autograder.contract.task import Case, Evidence, TaskEvidence, references
from autograder.proof.central_differences import realistic
from course.machines import machine
from course.program import Costs, Memory
from course.render.holdings import layout

RINGS = list(MEANING)
PUZZLES = [task.name for task in CONTRACT.tasks if task.kind == "value"]
TASKS = {task.name: task for task in CONTRACT.tasks}
MESH = {"data": 4, "tensor": 2}


@pytest.mark.parametrize(("name", "times"), [(name, 2 if name == "ring_all_reduce" else 1) for name in RINGS])
def test_bytes_are_those_of_the_theory(name, times):
    case = Case("", {"data": 8}, Chunks(chunk=3, width=5, backward=False))
    whole = 8 * 4 * 3 * 5
    assert bytes_form(case, name) == times * 7 / 8 * whole
    with_backward = case.with_sizes(backward=True)
    assert bytes_form(with_backward, name) == 2 * bytes_form(case, name)
    assert bytes_form(Case("", {"data": 1}, case.sizes), name) == 0


@pytest.mark.parametrize("name", RINGS)
def test_limit_on_temporaries_separates_reference_and_naive_by_more_than_15_percent(name):
    figures = references("collectives")[name]["temporaries"]
    case = realistic(TASKS[name])
    limit = CHUNKS_ALIVE * chunk_bytes(case)
    assert 1.15 * figures["reference"] < limit < figures["naive"] / 1.15


def test_no_ring_of_the_reference_is_slower_than_twice_its_bytes():
    for name in RINGS:
        seconds = references("collectives")[name]["seconds"]["reference"]
        assert seconds < 2 * bytes_form(realistic(TASKS[name]), name) / machine("8xH100").links[0].bandwidth


def test_message_for_a_wrong_spec_explains_what_it_means():
    crossed = layout((16, 8), P("tensor", "data"), MESH)
    assert spec_means(crossed, P("data", "tensor"), MESH) == (
        "With this spec each device holds a block [4, 4]; in the picture it holds [8, 2]."
    )
    slices = layout((8, 16), P(None, ("tensor", "data")), MESH)
    explanation = spec_means(slices, P(None, ("data", "tensor")), MESH)
    assert "right shape. With this spec device 2 holds [:, 4:6]" in explanation
    assert "in the picture it holds [:, 2:4]" in explanation
    assert "names the axis 'model'" in spec_means(crossed, P("model"), MESH)
    assert "twice" in spec_means(crossed, P("data", "data"), MESH)


def test_message_for_a_wrong_number_explains_what_it_means():
    case = Case("", MESH, Questions(seed=0))
    assert "cut into 4 equal parts" in block_means(case, (32, 16), P(("data", "tensor")), (8, 16))
    assert "as many dims as the array, here 2" in block_means(case, (32, 16), P("data"), (8,))
    assert "which has size 32" in block_means(case, (32, 16), P("data"), (128, 16))
    assert "Then there would be 8 different blocks" in copies_mean(case, (32,), P("data"), 1)
    assert "cannot be divided into groups of 3" in copies_mean(case, (32,), P("data"), 3)


def test_message_for_a_wrong_collective_explains_its_result():
    case, blocks = Case("", MESH, Sizes()), [(4, 4), (4, 8)]
    explanation = collective_means(case, ("psum", "tensor"), blocks, ("all_gather", "tensor"))
    assert "the whole sum of what the 2 devices along that axis hold" in explanation
    assert "[4, 4] before and [4, 8] after" in explanation
    assert "differ along it alone" in collective_means(case, ("all_gather", "data"), blocks, ("all_gather", "tensor"))
    assert "name alone" in collective_means(case, ("lax.all_gather", "tensor"), blocks, ("all_gather", "tensor"))
    assert "is not one of JAX's names" in collective_means(case, ("reduce_scatter", "data"), blocks, ("psum", "data"))


NESTED = [(None,) * 7, ((),) * 7, ((0, 0),) * 7, (("a", "b"),) * 7, (-8,) * 7, ("psum",), ("psum", 3)]
SPECS = [(("psum",), ("data",)), (P("data"), P()), P(3), P(("data", 3)), P(*["data"] * 9)]
ODD = [None, 3, "text", -1.5, True, (), *NESTED, *SPECS]


@pytest.mark.parametrize("name", PUZZLES)
def test_forged_answers_of_any_form_are_wrong_and_nothing_breaks(name):
    task, case = TASKS[name], TASKS[name].cases[0]
    expected = task.oracle({}, case)
    for odd in ODD:
        measured = {"values": value_tasks.encode(odd)}
        evidence = Evidence(case, (), (), measured, expected, Costs(0, 0, 0, (), {}), Memory(0, 0, 0, 0, ()))
        (fact,) = task.facts(TaskEvidence([evidence], None, {}))
        assert fact.passed is False and fact.message


@pytest.mark.parametrize("name", PUZZLES)
def test_no_answer_is_right_on_every_mesh_by_naming_axes_outright(name):
    right = [value_facts.decode(TASKS[name].oracle({}, case)["values"]) for case in TASKS[name].cases]
    assert len({repr(answer) for answer in right}) == len(right)


def test_every_block_and_its_copies_make_up_the_mesh():
    case = TASKS["puzzle_block"].cases[0]
    blocks = value_facts.decode(TASKS["puzzle_block"].oracle({}, case)["values"])
    copies = value_facts.decode(TASKS["puzzle_copies"].oracle({}, case)["values"])
    for (shape, spec), block, count in zip(questions(case), blocks, copies, strict=True):
        block_layout = layout(shape, spec, case.mesh)
        assert (block_layout.block, block_layout.copies) == (block, count)
        assert math.prod(block) * math.prod(case.mesh.values()) == count * math.prod(shape)

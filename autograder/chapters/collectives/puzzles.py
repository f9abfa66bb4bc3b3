"""Eight puzzles about pictures of array layouts: the right answers, and the meaning of wrong ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.chapters.collectives.wrapping import Questions, axes_of, questions
from autograder.chapters.draws import axis_names, unseen_case
from autograder.contract import value_facts, value_tasks
from autograder.contract.case import UNSEEN, Sizes
from autograder.contract.output_checks import show_spec
from autograder.contract.task import Case, Task, TaskEvidence
from autograder.contract.value_tasks import show
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings
from course.mesh import mesh_text
from course.puzzles import PANELS, mesh_of
from course.render.holdings import Layout, layout

Explain = Callable[[Case[Any], Any], str]
AXES_OF_CASES = (("data", "tensor"), ("pipe", "data"), ("tensor", "expert"))
# A device's resulting layout, by JAX's collective name; {n} is the axis size.
MEANS = {
    "all_gather": "the {n} blocks of the devices along that axis, joined",
    "psum": "the whole sum of what the {n} devices along that axis hold, the same on each",
    "pmean": "the whole mean of what the {n} devices along that axis hold, the same on each",
    "psum_scatter": "one of {n} parts of the sum of what the devices along that axis hold",
    "all_to_all": "a part of what each of the {n} devices along that axis held, including its own",
    "ppermute": "what another of the {n} devices along that axis held",
}


def _cases(*meshes: dict[str, int], sizes: Callable[[int], Sizes]) -> tuple[Case[Any], ...]:
    """A case for each mesh; a check runs the first two before all others. ``sizes`` takes the case's number."""
    by_name = {mesh_text(mesh): mesh for mesh in meshes}
    return tuple(Case(name, mesh, sizes(i), quick=i < 2) for i, (name, mesh) in enumerate(by_name.items()))


def _task(
    name: str,
    answer: Callable[[Case[Any]], Any],
    fact: Callable[[TaskEvidence], Fact],
    cases: tuple[Case[Any], ...],
    unseen: Callable[[np.random.Generator], Case[Any]],
) -> Task:
    """The task for a function of plain data; ``answer`` returns the right result."""
    return Task(
        wrapping=wrappings("collectives")[name],
        kind="value",
        points=0.5,
        cases=cases,
        unseen=unseen,
        draw=value_tasks.no_inputs,
        oracle=lambda inputs, case: {"values": value_tasks.encode(answer(case))},
        facts=lambda evidence: [fact(evidence)],
    )


def _of_picture(name: str, answer: Callable[[Case[Any]], Any], explain: Explain) -> Task:
    pictured_answer = answer(Case("", mesh_of(AXES_OF_CASES[0]), Sizes()))

    def explained(case: Case[Any], result: Any) -> str:
        names, text = axes_of(case), explain(case, result)
        if names == AXES_OF_CASES[0] or result != pictured_answer:
            return text
        return f"{text} Here the axes have other names than in the picture, {names[0]!r} and {names[1]!r}: use them."

    def fact(evidence: TaskEvidence) -> Fact:
        return value_facts.answer_matches(evidence.cases, explained)

    def unseen(rng: np.random.Generator) -> Case[Sizes]:
        first, second = axis_names(rng, 2)
        return Case(UNSEEN, mesh_of((first, second)), Sizes())

    return _task(f"puzzle_{name}", answer, fact, _cases(*map(mesh_of, AXES_OF_CASES), sizes=lambda _: Sizes()), unseen)


def spec_puzzle(name: str) -> Task:
    """The picture's ``PartitionSpec``."""
    (panel,) = PANELS[name]

    def explain(case: Case[Any], result: Any) -> str:
        expected = layout(panel.shape, panel.spec(*axes_of(case)), case.mesh)
        return spec_means(expected, result, case.mesh) if isinstance(result, P) else ""

    return _of_picture(name, lambda case: panel.spec(*axes_of(case)), explain)


def spec_means(wanted: Layout, spec: P, mesh: dict[str, int]) -> str:
    """The difference between a wrong spec and the picture."""
    try:
        spec_layout = layout(wanted.shape, spec, mesh)
    except ValueError as error:
        message = str(error)
        return f"{message[:1].upper()}{message[1:]}."
    if spec_layout.block != wanted.block:
        return (
            f"With this spec each device holds a block {list(spec_layout.block)}; in the picture it holds "
            f"{list(wanted.block)}."
        )
    theirs, ours = _indices_by_device(spec_layout), _indices_by_device(wanted)
    device = next((d for d in ours if theirs[d] != ours[d]), 0)
    return (
        f"The blocks have the right shape. With this spec device {device} holds [{theirs[device]}]; in the picture it "
        f"holds [{ours[device]}]."
    )


def _indices_by_device(array_layout: Layout) -> dict[int, str]:
    """The indices that each device holds, as ``0:4, :``."""
    return {
        device: ", ".join(array_layout.ranges(index))
        for index, holders in sorted(array_layout.holders.items())
        for device in holders
    }


def collective_puzzle(name: str, collective: str, over: int) -> Task:
    """The collective between two pictures and the axis that it runs over: the mesh's axis number ``over``."""
    before, after = PANELS[name]

    def explain(case: Case[Any], result: Any) -> str:
        blocks = [layout(p.shape, p.spec(*axes_of(case)), case.mesh).block for p in (before, after)]
        return collective_means(case, result, blocks, (collective, axes_of(case)[over]))

    return _of_picture(name, lambda case: (collective, axes_of(case)[over]), explain)


def collective_means(case: Case[Any], answer: Any, blocks: list[tuple[int, ...]], right: tuple[str, str]) -> str:
    """A wrong collective's result on a device, compared with the picture."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        return "Expected two strings: JAX's name for the collective, and the axis that it runs over."
    name, axis = answer
    if isinstance(name, str) and name not in MEANS and name.removeprefix("jax.").removeprefix("lax.") in MEANS:
        return f"Give the name alone, without the module: not {name!r}."
    if not isinstance(name, str) or name not in MEANS:
        return f"{name!r} is not one of JAX's names: {', '.join(MEANS)}."
    if not isinstance(axis, str) or axis not in case.mesh:
        return f"{axis!r} is not an axis of this mesh, whose axes are {' and '.join(map(repr, case.mesh))}."
    result = f"After {name} over {axis!r} each device would hold {MEANS[name].format(n=case.mesh[axis])}"
    if name == right[0]:
        return f"{result}. An axis connects devices that differ along it alone: which ones have to exchange data?"
    return f"{result}; in the picture it has a block {list(blocks[0])} before and {list(blocks[1])} after."


def _entry_size(entry: Any, mesh: dict[str, int]) -> int:
    names = (entry,) if isinstance(entry, str) else entry or ()
    return math.prod(mesh[name] for name in names)


def block_of(shape: tuple[int, ...], spec: P, mesh: dict[str, int]) -> tuple[int, ...]:
    """The local shape."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    return tuple(dim // _entry_size(entry, mesh) for dim, entry in zip(shape, entries, strict=True))


def copies_of(spec: P, mesh: dict[str, int]) -> int:
    """Number of devices that hold the same block."""
    return math.prod(mesh.values()) // math.prod(_entry_size(entry, mesh) for entry in spec)


def _premise(case: Case[Any], shape: tuple[int, ...], spec: P) -> str:
    return f"for shape {list(shape)} with {show_spec(spec)} {case.place} you say that"


def block_means(case: Case[Any], shape: tuple[int, ...], spec: P, answer: Any) -> str:
    """The meaning of a wrong local shape."""
    prefix = f"{_premise(case, shape, spec)} each device holds {show(answer)}. "
    if not isinstance(answer, tuple) or len(answer) != len(shape):
        return f"{prefix}A block has as many dims as the array, here {len(shape)}."
    right = block_of(shape, spec, case.mesh)
    dim = next((d for d in range(len(shape)) if answer[d] != right[d]), 0)
    length = answer[dim]
    if type(length) is not int or length < 1 or shape[dim] % length:
        return f"{prefix}Blocks of {show(length)} cannot fill dim {dim}, which has size {shape[dim]}."
    parts = shape[dim] // length
    times = "it is not cut at all" if parts == 1 else f"it is cut into {parts} equal parts"
    return (
        f"{prefix}Along dim {dim} this means that {times}: which axes does the spec name there, and how large are they?"
    )


def copies_mean(case: Case[Any], shape: tuple[int, ...], spec: P, answer: Any) -> str:
    """The meaning of a wrong number of copies."""
    devices = math.prod(case.mesh.values())
    prefix = f"{_premise(case, shape, spec)} a block is held by {show(answer)} of {devices} devices. "
    if type(answer) is not int or answer < 1 or devices % answer:
        return f"{prefix}{devices} devices cannot be divided into groups of {show(answer)}."
    blocks = "one block" if answer == devices else f"{devices // answer} different blocks"
    return f"{prefix}Then there would be {blocks}: into how many does the spec cut the array?"


_MESHES = (
    {"data": 4, "tensor": 2},
    {"pipe": 3, "tensor": 2},
    {"pipe": 2, "data": 2, "tensor": 2},
    {"data": 5},
    {"tensor": 1, "data": 4},
    {"data": 1},
)


def _number_puzzle(name: str, right: Callable[..., Any], means: Callable[..., str]) -> Task:
    """Make a puzzle: ``right`` gives the answer for one shape, spec and mesh; ``means`` explains a wrong one."""

    def answer(case: Case[Questions]) -> Any:
        return tuple(right(shape, spec, case.mesh) for shape, spec in questions(case))

    def fact(evidence: TaskEvidence) -> Fact:
        return value_facts.every_answer_matches(
            evidence.cases,
            questions,
            lambda case, question, result: result == right(*question, case.mesh),
            lambda case, question, result: means(case, *question, result),
        )

    def unseen(rng: np.random.Generator) -> Case[Questions]:
        return unseen_case(rng, Questions(seed=int(rng.integers(2**31))), (2, 3), (3, 1, 2), (6,), (2, 2))

    return _task(name, answer, fact, _cases(*_MESHES, sizes=lambda i: Questions(seed=i)), unseen)


PUZZLES = (
    spec_puzzle("rows"),
    spec_puzzle("crossed"),
    spec_puzzle("slices"),
    _number_puzzle("puzzle_block", block_of, block_means),
    _number_puzzle("puzzle_copies", lambda _, spec, mesh: copies_of(spec, mesh), copies_mean),
    collective_puzzle("join", "all_gather", 1),
    collective_puzzle("add", "psum_scatter", 1),
    collective_puzzle("turn", "all_to_all", 0),
)

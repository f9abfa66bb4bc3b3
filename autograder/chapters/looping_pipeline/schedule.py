"""``layers_of_stage`` and ``loop_position``: functions of numbers, tested for every stage and every tick."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from autograder.chapters.looping_pipeline.wrapping import MOST, Schedule, Stages
from autograder.contract import value_facts, value_tasks
from autograder.contract.case import UNSEEN
from autograder.contract.diagnosis.misplaced import grid
from autograder.contract.task import Case, Task, TaskEvidence
from autograder.contract.text import count_of
from autograder.contract.value_tasks import Refusal, show
from autograder.contract.verdict import Fact
from autograder.contract.wrapping import wrappings
from course.schedules import num_ticks

Question = tuple[Any, ...]
# Number of ticks of a schedule that are shown: more would not fit on a line.
SHOWN = 14


def layers(stage: int, num_stages: int, num_repeats: int, num_layers: int) -> tuple[tuple[int, ...], ...] | None:
    """The layers of a stage, grouped by repeat; None if they cannot be shared evenly."""
    visits = num_stages * num_repeats
    if num_layers % visits:
        return None
    each = num_layers // visits
    visited = [tuple(range(visit * each, (visit + 1) * each)) for visit in range(visits)]
    return tuple(visited[stage::num_stages])


def positions(num_stages: int, num_microbatches: int, num_repeats: int) -> dict[tuple[int, int], tuple[int, int]]:
    """The work of every stage at every tick, found by following microbatches around: no entry where it is idle.

    Stage 0 takes the microbatches of a repeat in order, one per tick, each as soon as it is back from the previous
    repeat, and starts no repeat before the previous one has entered completely.
    """
    work, free = {}, 0
    back = [0] * num_microbatches
    for repeat in range(num_repeats):
        for microbatch in range(num_microbatches):
            start = max(free, back[microbatch])
            for stage in range(num_stages):
                work[start + stage, stage] = (microbatch, repeat)
            free, back[microbatch] = start + 1, start + num_stages
    return work


def layer_questions(case: Case[Stages]) -> list[Question]:
    """Every stage for some repeats and layers, and numbers of layers that cannot be shared evenly."""
    stages, even = case.sizes.num_stages, [(1, 2), (2, 1), (2, 3), (3, 1), (4, 2)]
    odd = [(2, 2 * stages - 1), (2, stages * 3), (3, stages * 3 + 1), (1, stages * 2 + 1)]
    if case.sizes.seed >= 0:
        rng = np.random.default_rng(case.sizes.seed)
        even = [(int(repeats), int(each)) for repeats, each in (*rng.integers(1, 5, (4, 2)), (rng.integers(2, 5), 3))]
        pairs = rng.integers(1, [4, stages], (3, 2))
        odd = [(repeats, stages * repeats * int(k) + int(j)) for repeats, (k, j) in enumerate(pairs, 1)]
    questions = [(stage, stages, repeats, stages * repeats * each) for repeats, each in even for stage in range(stages)]
    return questions + [(stages - 1, stages, repeats, count) for repeats, count in odd if count % (stages * repeats)]


def position_questions(case: Case[Schedule]) -> list[Question]:
    """Every tick of a forward pass, and the one after it, at every stage."""
    sizes = case.sizes.num_stages, case.sizes.num_microbatches, case.sizes.num_repeats
    return [(tick, stage, *sizes) for tick in range(num_ticks(*sizes) + 1) for stage in range(sizes[0])]


def _same(answer: Any, expected: Any) -> bool:
    """Compare numbers and their types: 2.0 is not a valid index."""
    return answer == expected and show(answer) == show(expected)


def layers_right(_: Case[Any], question: Question, answer: Any) -> bool:
    expected = layers(*question)
    if expected is not None:
        return _same(answer, expected)
    return isinstance(answer, Refusal) and str(question[3]) in re.findall(r"\d+", answer.message)


def positions_right(_: Case[Any], question: Question, answer: Any) -> bool:
    tick, stage, *sizes = question
    return _same(answer, positions(*sizes).get((tick, stage)))


def layers_mean(_: Case[Any], question: Question, answer: Any) -> str:
    """The meaning of a wrong answer about layers."""
    stage, stages, repeats, count = question
    setting = f"for stage {stage} of {stages}, {count_of(repeats, 'repeat')} and {count_of(count, 'layer')}"
    start = f"{setting} your answer is {show(answer)[:120]}. "
    if layers(*question) is None:
        if isinstance(answer, Refusal):
            return f"{start}Refusing is right; the message must also say how many layers were given."
        shared = f"{count_of(count, 'layer')} cannot be shared evenly by {count_of(stages, 'stage')}"
        return f"{start}{shared} in {count_of(repeats, 'repeat')}: raise a ValueError that says how many were given."
    if isinstance(answer, Refusal):
        return f"{start}These layers can be shared evenly: {stages * repeats} times {count // (stages * repeats)}."
    if not isinstance(answer, tuple) or not all(isinstance(group, tuple) for group in answer):
        return f"{start}Expected a tuple with one tuple of layer numbers for each repeat."
    numbers = [number for group in answer for number in group]
    if any(type(number) is not int for number in numbers):
        return f"{start}Expected whole numbers of type int."
    if len(answer) != repeats or len(numbers) != count // stages:
        expected = f"{count_of(repeats, 'tuple')} with {count_of(count // stages, 'layer')} in total"
        return f"{start}Expected {expected}; your answer has {len(numbers)} in {len(answer)}."
    return (
        f"{start}Follow one microbatch: it goes through stages 0 to {stages - 1} in order, {count_of(repeats, 'time')}."
        " Which layers has it been through when it comes here?"
    )


def positions_mean(_: Case[Any], question: Question, answer: Any) -> str:
    """The meaning of a wrong answer about a tick."""
    tick, stage, stages, microbatches, repeats = question
    setting = f"with {count_of(microbatches, 'microbatch', 'microbatches')} and {count_of(repeats, 'repeat')}"
    start = f"at tick {tick}, stage {stage} of {stages}, {setting} your answer is {show(answer)[:80]}. "
    if answer is None and not stage:
        return f"{start}But there is work: which microbatch enters here, or has come back from the last stage?"
    if answer is None:
        return f"{start}But there is work: which microbatch did the stage before it work on one tick earlier?"
    if not isinstance(answer, tuple) or [type(number) for number in answer] != [int, int]:
        return f"{start}Expected (microbatch, repeat), two numbers of type int, or None for an idle tick."
    microbatch, repeat = answer
    expected = positions(stages, microbatches, repeats)
    if microbatch != repeat and expected.get((tick, stage)) == (repeat, microbatch):
        return f"{start}These are the right numbers the other way round: the microbatch comes first, then the repeat."
    if not (0 <= microbatch < microbatches and 0 <= repeat < repeats):
        return f"{start}There is no such microbatch or no such repeat."
    at = {position: tick for (tick, other_stage), position in expected.items() if other_stage == stage}
    early = "before" if tick < at[microbatch, repeat] else "after"
    return (
        f"{start}Draw the schedule: stage 0 takes a new microbatch each tick, and each stage does one tick later what "
        f"the stage before it did. This tick is {early} the one in which this stage works on microbatch {microbatch} "
        f"in repeat {repeat}. When does a microbatch come round again, and does it have to wait?"
    )


def schedules(case: Case[Schedule], answers: tuple[Any, ...]) -> str:
    """The schedule that the answers imply, and the right one, from two ticks before they differ."""
    ticks_and_stages, stages = position_questions(case), range(case.sizes.num_stages)
    right = positions(case.sizes.num_stages, case.sizes.num_microbatches, case.sizes.num_repeats)
    yours = {question[:2]: answer for question, answer in zip(ticks_and_stages, answers, strict=True)}

    def cell(answer: Any) -> str:
        fits = isinstance(answer, tuple) and [*map(type, answer)] == [int, int]
        if fits and 0 <= answer[0] < 100 and 0 <= answer[1] <= case.sizes.num_repeats:
            return f"{answer[0]}{answer[1] * chr(39)}"
        return "." if answer is None else "?"

    # Compared as they are drawn, since (0.0, 0) equals (0, 0).
    differ = [tick for (tick, stage), answer in yours.items() if cell(answer) != cell(right.get((tick, stage)))]
    first = max(0, differ[0] - 2)
    ticks = range(first, min(first + SHOWN, ticks_and_stages[-1][0] + 1))
    your_rows, right_rows = (
        [[cell(work.get((tick, stage))) for tick in ticks] for stage in stages] for work in (yours, right)
    )
    title = "\nThe microbatch, with ' for each repeat after the first, and . where a stage is idle:"
    return title + grid(your_rows, right_rows, "stage", "tick", first)


def _task(
    name: str,
    points: float,
    cases: tuple[Case[Any], ...],
    unseen: Callable[[np.random.Generator], Case[Any]],
    questions: Callable[[Case[Any]], list[Question]],
    right: Callable[[Case[Any], Question, Any], bool],
    means: Callable[[Case[Any], Question, Any], str],
    known: Callable[[Question], Any],
    picture: Callable[[Case[Any], tuple[Any, ...]], str] = lambda *_: "",
) -> Task:
    def oracle(_: Any, case: Case[Any]) -> dict[str, Any]:
        return {"values": value_tasks.encode(tuple(known(question) for question in questions(case)), MOST)}

    def facts_of(evidence: TaskEvidence) -> list[Fact]:
        return [value_facts.every_answer_matches(evidence.cases, questions, right, means, picture)]

    return Task(
        wrapping=wrappings("looping_pipeline")[name],
        kind="value",
        points=points,
        cases=cases,
        unseen=unseen,
        draw=value_tasks.no_inputs,
        oracle=oracle,
        facts=facts_of,
        given=lambda case: {"questions": questions(case)},
    )


def _schedule(num_stages: int, num_microbatches: int, num_repeats: int, *, name: str = "", quick: bool = False) -> Any:
    microbatches = count_of(num_microbatches, "microbatch", "microbatches")
    name = name or f"{count_of(num_stages, 'stage')}, {microbatches}, {count_of(num_repeats, 'repeat')}"
    sizes = Schedule(num_stages=num_stages, num_microbatches=num_microbatches, num_repeats=num_repeats)
    return Case(name, {"pipe": num_stages}, sizes, quick)


def _unseen_layers(rng: np.random.Generator) -> Case[Stages]:
    stages = int(rng.choice([2, 5, 6, 7]))
    return Case(UNSEEN, {"pipe": stages}, Stages(num_stages=stages, seed=int(rng.integers(2**31))))


def _unseen_schedule(rng: np.random.Generator) -> Case[Schedule]:
    stages, microbatches, repeats = int(rng.choice([2, 3, 4, 6])), int(rng.integers(1, 10)), int(rng.integers(2, 5))
    return _schedule(stages, microbatches, repeats, name=UNSEEN)


LAYERS_OF_STAGE = _task(
    "layers_of_stage",
    1,
    tuple(Case(count_of(n, "stage"), {"pipe": n}, Stages(num_stages=n), i < 2) for i, n in enumerate((4, 3, 8, 1))),
    _unseen_layers,
    layer_questions,
    layers_right,
    layers_mean,
    lambda question: Refusal(f"{question[3]} layers") if layers(*question) is None else layers(*question),
)
LOOP_POSITION = _task(
    "loop_position",
    2,
    (
        _schedule(4, 6, 3, quick=True),
        _schedule(4, 2, 3, quick=True),
        _schedule(5, 5, 3),
        _schedule(6, 1, 2),
        _schedule(3, 7, 1),
        _schedule(1, 3, 2),
    ),
    _unseen_schedule,
    position_questions,
    positions_right,
    positions_mean,
    lambda question: positions(*question[2:]).get(question[:2]),
    schedules,
)

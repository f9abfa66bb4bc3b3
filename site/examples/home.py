"""The home page: two timelines of FSDP, and the output of ``check`` for a program that keeps too much."""

import linecache

from showing import draw_steps, example, look, wrong

from autograder.checking.follow_up import quote_lines
from autograder.checking.judging import judge_function
from autograder.contract.task import find_task, load
from autograder.contract.verdict import Report
from autograder.grading.outside.judge import plan
from autograder.render import facts_html
from solutions.fsdp import fsdp_train_step


@example("run on CPU devices")
def check() -> dict[str, str]:
    """A function with right values and gradients that keeps every gathered weight until the backward pass."""
    chapter, task = find_task("fsdp_loss")
    function = wrong(chapter)["keeps_gathered_weights"]
    source = function.__code__.co_filename
    result, _ = judge_function(plan(chapter, task, stretched=True), function, {source: "cell 7"}.get)
    failed = [fact.name for fact in result.facts if fact.passed is False]
    assert failed == ["live temporaries"], "values and gradients are right, and memory is not"
    result = quote_lines(result, lambda _, number: linecache.getline(source, number))
    return {"check": facts_html(Report(chapter, (result,)))}


@example()
def timelines() -> None:
    """The step on 8 H100s, with each layer gathered when it is used and one layer ahead."""
    task = load("fsdp").task("fsdp_train_step")
    ways = {
        "a layer is gathered when it is needed": wrong("fsdp")["gathers_when_it_computes"],
        "a layer is gathered while the one before it computes": fsdp_train_step,
    }
    steps = {name: look(task, function).timeline for name, function in ways.items()}
    before, after = steps.values()
    assert after.seconds < 0.9 * before.seconds
    draw_steps("steps", steps)

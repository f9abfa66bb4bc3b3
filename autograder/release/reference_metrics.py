"""Figures of each function's reference and naive baseline, on which limits are based."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from autograder.contract.task import Task, load, references, trace
from autograder.release.notebook import BuildError
from course.curriculum import contract_folder
from course.machines import machine
from course.program import costs, memory, parse, timeline


def measure(chapter: str) -> dict[str, Any]:
    """Figures of every task that is analysed at a realistic size, for the installed jax.

    Raises:
        BuildError: A function cannot be measured.

    Returns:
        ``{task: {"temporaries": {"reference": bytes, "naive": bytes}, "flops": {...}, "seconds": {...}}}``; a
        task's naive baseline may differ between time and memory.
    """
    solution = importlib.import_module(f"solutions.{chapter}")
    mutants = {
        (m.task, m.name): m.function for m in importlib.import_module(f"autograder.chapters.{chapter}.mutants").MUTANTS
    }
    result = {}
    for task in load(chapter).tasks:
        if task.at_scale:
            reference = _look(chapter, task, getattr(solution, task.name, None), "solution")
            naive = {
                name: _look(chapter, task, mutants.get((task.name, name)), name)
                for name in {task.naive_memory, task.naive_time}
                if name
            }
            result[task.name] = {
                figure: {"reference": reference[figure]} | ({"naive": naive[name][figure]} if name else {})
                for figure, name in (
                    ("temporaries", task.naive_memory),
                    ("flops", task.naive_memory),
                    ("seconds", task.naive_time),
                    ("exposed", task.naive_time),
                    ("spent", task.naive_time),
                )
                if figure in reference
            }
    return result


def _look(chapter: str, task: Task, function: Callable[..., Any] | None, version: str) -> dict[str, float]:
    """Call ``look``, and turn an error into a sentence for the author of a chapter.

    Raises:
        BuildError: There is no such function, or it does not run at the realistic size.
    """
    where = f"{chapter}: {task.name}, {version}"
    if function is None:
        raise BuildError(f"{where}: there is no such function in solutions/{chapter}.py or mutants.py; write it there")
    try:
        return look(task, function)
    except Exception as error:
        raise BuildError(
            f"{where}, cannot be measured in the case {task.at_scale and task.at_scale[0].name!r}: "
            f"{type(error).__name__}: {error}; wrapping.py and the function must agree"
        ) from error


def look(task: Task, function: Callable[..., Any]) -> dict[str, float]:
    """Figures of one function at the realistic size of its task."""
    assert task.at_scale
    program = trace(task, function, task.at_scale[0], lambda _: None)
    module = parse(program, data_branches=task.data_branches)
    target_machine = machine(task.machine)
    time = timeline(module, target_machine)
    axis_figures = (
        {"spent": time.seconds - timeline(module, target_machine, free=task.exposed_axes).seconds}
        if task.exposed_axes
        else {}
    )
    return {
        "temporaries": memory(module, program, early=time.early).temporaries,
        "flops": costs(module).flops,
        "seconds": time.seconds,
        "exposed": time.exposed_seconds,
    } | axis_figures


def write(chapter: str) -> Path:
    """Measure, and store the figures with those of other jax versions."""
    path = contract_folder(chapter) / "references.json"
    by_version = json.loads(path.read_text()) if path.exists() else {}
    by_version[jax.__version__] = measure(chapter)
    path.write_text(json.dumps(by_version, indent=2, sort_keys=True) + "\n")
    references.cache_clear()
    return path

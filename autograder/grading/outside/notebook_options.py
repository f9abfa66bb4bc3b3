"""The course's own parts of a released notebook, apart from the exercise: its lab, and the variants it asks for."""

import ast
import re
from collections.abc import Iterable
from contextlib import suppress
from functools import cache

from autograder.grading.inside.intake import Cell
from course.curriculum import home

_VARIANTS = re.compile(r"""^check\(\s*(\w+)\s*,.*?\bvariant\s*=\s*["']([\w-]+)["']""", re.MULTILINE)

_LIMITS = re.compile(r"""^check\(\s*(\w+)\s*,.*?\blimits\s*=\s*(\{[^{}]*\})""", re.MULTILINE)


@cache
def lab_code(chapter: str) -> tuple[str, ...]:
    """The statements of the chapter's lab, which a released notebook runs: the script-only part of its source.

    If the source is not installed, there are none, and a notebook's lab runs like the rest of the notebook.
    """
    path = home(chapter) / "solutions" / f"{chapter}.py"
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else []
    guards = [node for node in body if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)]
    return tuple(ast.unparse(node) for guard in guards for node in guard.body)


def requested_limits(cells: Iterable[Cell]) -> dict[str, dict[str, float]]:
    """The factors on limits that a notebook's check cells ask for, by function and fact."""
    limits: dict[str, dict[str, float]] = {}
    for cell in cells:
        for name, text in _LIMITS.findall(cell.source):
            with suppress(ValueError, SyntaxError):
                limits[name] = {str(fact): float(factor) for fact, factor in ast.literal_eval(text).items()}
    return limits


def requested_variants(cells: Iterable[Cell]) -> dict[str, str]:
    """The variants that a notebook's check cells ask for, by function."""
    return {name: variant for cell in cells for name, variant in _VARIANTS.findall(cell.source)}

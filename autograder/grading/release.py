"""What a released notebook holds of the course's own beside the exercise: its lab."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

SOLUTIONS = Path(__file__).resolve().parents[2] / "solutions"


@cache
def lab_code(chapter: str) -> tuple[str, ...]:
    """The statements of the chapter's lab, which a released notebook runs: of its source, what only a script runs.

    Where the source is not installed there are none, and a notebook's lab is run like the rest of it.
    """
    path = SOLUTIONS / f"{chapter}.py"
    body = ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else []
    guards = [node for node in body if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)]
    return tuple(ast.unparse(node) for guard in guards for node in guard.body)

"""Find the functions of a notebook that have changed: those whose own cell has, and those that use changed code."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autograder.grading.inside.cells import Statement, read_statements
from autograder.grading.inside.intake import Cell
from autograder.grading.inside.running import lab_statements
from autograder.grading.inside.slicing import names_of, needed
from autograder.grading.outside.notebook_options import lab_code, requested_limits, requested_variants


@dataclass(frozen=True)
class Fingerprint:
    """A hash of a function: of the statements that define it, and of everything it needs. Comments do not count."""

    own: str
    all: str


def fingerprints(chapter: str, cells: Sequence[Cell], functions: Iterable[str]) -> dict[str, Fingerprint]:
    """The fingerprint of each function in a notebook's code cells."""
    statements = read_statements(cells)
    lab = lab_statements(lab_code(chapter))
    labs = frozenset(n for n, statement in enumerate(statements) if statement.node and ast.dump(statement.node) in lab)
    texts = [_text(statement, cells) for statement in statements]
    binds = [names_of(statement).binds for statement in statements]
    variants, limits = requested_variants(cells), requested_limits(cells)

    def digest(numbers: Iterable[int], extra: str = "") -> str:
        return hashlib.sha256("\n".join([*(texts[n] for n in sorted(numbers)), extra]).encode()).hexdigest()

    return {
        name: Fingerprint(
            digest(n for n, names in enumerate(binds) if name in names),
            digest(needed(statements, [name], labs), variants.get(name, "") + str(limits.get(name, ""))),
        )
        for name in functions
    }


def _text(statement: Statement, cells: Sequence[Cell]) -> str:
    """A statement without comments and line numbers; the whole source of a cell that cannot be parsed."""
    if statement.node is not None:
        return ast.dump(statement.node)
    number = int(statement.file.split(":")[1])
    return cells[number - 1].source

"""Typical mistakes of learners, and the required messages: ``python -m autograder.proof.mistakes``.

A mistake is an edit of a cell of the solved notebook, which is then checked as by ``meshcraft check``. The message to
the learner must name what is wrong (``says``), quote the line where it is written (``line``), and contain
nothing internal to the grader.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from autograder.check import check_cells
from autograder.contract.task import find_task, load
from autograder.contract.verdict import PASS, Kind, Report
from autograder.grading.inside.intake import Cell, Notebook, parse_notebook
from autograder.release.notebook import source_notebook

# Text that no learner should have to read: the grader's files, JAX's and MLIR's inner forms, colours, a bare assertion.
_INNER = {
    "a path": r"/\w+/\S*\.py|site-packages|autograder[./]",
    "a jaxpr": r"\{ ?lambda ?;|\blet\b.*\bin \(|JVPTracer|JitTracer|DynamicJaxprTracer|Traced<|\bjaxpr\b|closed_call",
    "MLIR": r"stablehlo|\bmlir\b|loc\(|tensor<|\bsdy\b|%\d+ = ",
    "colours": r"\x1b|\ufffd\[",
    "no more than an assertion": r"AssertionError\s*$|AssertionError:?\s*\n",
}
# The message about a Python branch on a traced value.
CANNOT_BRANCH = r"not known while .* traced.*(jnp\.where|lax\.select)"
# A mistake's ``line``, if that is the line that its first edit makes.
EDITED = "the edited line"
VERDICTS = "true", "misleading", "no line", "inner", "not said", "passes"


# --8<-- [start:mistake]
@dataclass(frozen=True)
class Mistake:
    """A typical mistake, and the message that a learner must see.

    Attributes:
        says: A regular expression that the message must match, with any whitespace.
        edits: Maps text that occurs exactly once in the cell's source to its replacement; empty for a stub.
        line: The text of the learner's line that must be quoted, or ``EDITED``; empty if none is to blame.
        inside: Another function, whose cell is edited instead.
        never: A regular expression that the message must not match.
        function, name: The function that is checked and the mistake's name, which are its keys in a table.
    """

    says: str
    edits: Mapping[str, str] = field(default_factory=dict)
    line: str = ""
    inside: str = ""
    never: str = ""
    function: str = ""
    name: str = ""
    # --8<-- [end:mistake]

    @property
    def chapter(self) -> str:
        return find_task(self.function)[0]

    @property
    def quoted(self) -> str:
        """The text of the line that must be quoted."""
        if self.line != EDITED:
            return self.line
        source = next(cell.source for cell in self.notebook().cells if cell.id == (self.inside or self.function))
        at = source.index(next(iter(self.edits.values())))
        return source.split("\n")[source.count("\n", 0, at)]

    def notebook(self) -> Notebook:
        """The solved notebook with the mistake.

        Raises:
            ValueError: A text does not occur exactly once in the cell.
        """
        edited, solved = self.inside or self.function, _solved(self.chapter)
        cells = tuple(replace(cell, source=self._source(cell)) if cell.id == edited else cell for cell in solved)
        return Notebook(cells, self.name)

    def _source(self, cell: Cell) -> str:
        source = re.sub(r" *### (BEGIN|END) SOLUTION\n?", "", cell.source)
        if not self.edits:
            return source[: source.rindex('"""') + 3] + "\n    raise NotImplementedError()"
        for old in self.edits:
            if (times := source.count(old)) != 1:
                raise ValueError(f"{self.name}: {old!r} occurs {times} times in {cell.id}, expected once")
        return re.sub("|".join(map(re.escape, self.edits)), lambda match: self.edits[match.group()], source)


@dataclass(frozen=True)
class Assessment:
    """The message that a learner sees about a mistake, and its assessment: one of ``VERDICTS``, and why."""

    text: str
    verdict: str
    why: str = ""


@cache
def _solved(chapter: str) -> tuple[Cell, ...]:
    return parse_notebook(chapter, json.dumps(source_notebook(chapter)).encode()).everything


def check_message(mistake: Mistake) -> Assessment:
    """Check the notebook as a learner would, and assess the message."""
    report = check_cells(mistake.notebook(), mistake.chapter, [mistake.function])
    return assess(mistake, report)


def assess(mistake: Mistake, report: Report) -> Assessment:
    """Assess the message that a learner sees."""
    text = shown(report)
    flat = " ".join(text.split())
    function_names = {task.name for task in load(mistake.chapter).tasks}
    lines = [line for line in _lines(report) if line]
    foreign = [line for line in lines if line.rpartition(":")[0] not in function_names]
    if report.functions[0].verdict == PASS:
        return Assessment(text, "passes")
    if foreign:
        return Assessment(text, "misleading", f"{foreign[0]} is not where the mistake is")
    if any(fact.line and fact.kind is Kind.VALUES for fact in report.functions[0].missed):
        return Assessment(text, "misleading", "wrong values point at a line, and no line is to blame")
    never = [mistake.never, "" if "def " in mistake.quoted else rf"\bdef {mistake.function}\("]
    if match := re.search("|".join(filter(None, never)) or "$^", flat):
        return Assessment(text, "misleading", f"it says {match.group()!r}")
    for kind, pattern in _INNER.items():
        if match := re.search(pattern, text):
            return Assessment(text, "inner", f"{kind}: {match.group()[:60]!r}")
    if not re.search(mistake.says, flat):
        return Assessment(text, "not said", f"nothing matches {mistake.says!r}")
    texts = [] if report.functions[0].not_started else [_text(mistake, line) for line in lines]
    if unquoted := [text for text in (mistake.quoted, *texts) if " ".join(text.split()) not in flat]:
        return Assessment(text, "no line", f"{unquoted[0].strip()!r} is not quoted")
    return Assessment(text, "true")


def shown(report: Report) -> str:
    """The report as a terminal shows it."""
    from rich.console import Console

    from autograder.render import facts_table

    console = Console(width=100)
    with console.capture() as capture:
        console.print(facts_table(report))
    return textwrap.dedent(capture.get()).strip()


def _text(mistake: Mistake, line: str) -> str:
    """The source of a line of the notebook that has the mistake."""
    name, _, number = line.rpartition(":")
    return next(cell.source.split("\n")[int(number) - 1] for cell in mistake.notebook().cells if cell.id == name)


def _lines(report: Report) -> list[str]:
    (result,) = report.functions
    return [result.line, *(fact.line for fact in result.missed)]

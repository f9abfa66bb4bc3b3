"""Attacks as declared by the files in ``hostile-cells/``, whose folder name cannot be imported."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from autograder.contract.task import load
from autograder.contract.verdict import FAIL, LIMIT_EXCEEDED, NEEDS_HUMAN, PARTIAL, PASS, REFUSED, STUDENT_ERROR

CELLS = Path(__file__).parent / "hostile-cells"
CHAPTER = "fsdp"
VERDICTS = (PASS, PARTIAL, FAIL, STUDENT_ERROR, LIMIT_EXCEEDED, REFUSED, NEEDS_HUMAN)
GROUPS = {
    "reads": "reads what it must not",
    "forges": "forges a result",
    "tampers": "tampers",
    "exhausts": "exhausts",
    "reaches": "reaches people",
}
_SECTION = re.compile(r"^# %% (defaults|helper|attack)\b *(.*)\n((?:#(?! %%).*\n)*)", re.MULTILINE)


class AttackError(Exception):
    """An attack violates the format in the package's docstring; the message names it and its file."""


class Attack(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One attack; the package's docstring explains the header's keys.

    Attributes:
        says: Description of the attempt and of the required outcome.
        submit: Submits it, given the student's folder and the notebook that students were given.
    """

    name: str
    says: str
    submit: Callable[[Path, Path], None]
    verdict: str
    group: str
    control: bool | str
    chapter: str = CHAPTER
    functions: tuple[str, ...] = ()
    points: float | None = None
    backends: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"{self.verdict!r} is not a verdict: {', '.join(VERDICTS)}")
        if self.group not in GROUPS or not self.says:
            raise ValueError(f"an attack says what it tries, and has a group: {', '.join(GROUPS)}")
        if not self.control:
            raise ValueError("control is true, or why stock nbgrader is not tried on it")
        if unknown := set(self.functions) - set(graded(self.chapter)):
            raise ValueError(f"{self.chapter} has no function {', '.join(sorted(unknown))}")
        if (self.points is not None) != (self.verdict == PARTIAL):
            raise ValueError("an attack says what points it earns if, and only if, its verdict is partial")


def graded(chapter: str) -> tuple[str, ...]:
    """The functions that a chapter grades; each is the grade id of a cell."""
    return tuple(task.name for task in load(chapter).tasks)


def read_attacks(folder: Path = CELLS) -> Iterator[Attack]:
    """The attacks that the folder's files declare.

    Raises:
        AttackError: one is malformed.
    """
    helpers = read_helpers(folder)
    for file in sorted(folder.glob("*.py")):
        defaults: dict[str, Any] = {}
        for section in _SECTION.finditer(file.read_text("utf-8")):
            comment = [line.lstrip("# ") for line in section[3].splitlines()]
            try:
                if section[1] == "defaults":
                    defaults = tomllib.loads("\n".join(comment))
                elif section[1] == "attack":
                    yield _attack(section[2], comment, _code(section), defaults, helpers)
            except (ValueError, LookupError, SyntaxError, msgspec.ValidationError) as error:
                raise AttackError(f"{file.name}, {section[2] or 'defaults'}: {error}") from None


def read_helpers(folder: Path = CELLS) -> dict[str, str]:
    """Code that attacks share, by name."""
    sections = [
        section for file in sorted(folder.glob("*.py")) for section in _SECTION.finditer(file.read_text("utf-8"))
    ]
    return {section[2]: _code(section) for section in sections if section[1] == "helper"}


def _code(section: re.Match[str]) -> str:
    """The text between a section's header and the next section."""
    following = _SECTION.search(section.string, section.end())
    return section.string[section.end() : following.start() if following else None].strip()


def _attack(title: str, comment: list[str], code: str, defaults: dict[str, Any], helpers: dict[str, str]) -> Attack:
    while "{" in title and not title.endswith("}"):
        title += " " + comment.pop(0)
    name, _, header = title.partition(" ")
    fields = {"uses": [], "then": "", **defaults, **tomllib.loads(f"header = {header or '{}'}")["header"]}
    cells = [(each, helpers[each]) for each in ["imports"] * ("imports" in helpers) + fields.pop("uses")]
    then = fields.pop("then")
    cells += [("attack", code), *([(then, helpers[then])] if then else [])]
    known = graded(fields.get("chapter", CHAPTER))
    new, answers = [], {}
    for ident, text in cells:
        rest, functions = _split_functions(text, known) if ident in ("attack", then) else (text, {})
        answers |= functions
        new += [code_cell(ident, rest)] if rest else []
    fields["functions"] = fields.get("functions") or list(answers or known)
    submit = partial(_submit, new, answers)
    return msgspec.convert({"name": name, "says": " ".join(comment), "submit": submit, **fields}, Attack)


def _split_functions(code: str, names: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """Split the functions with these names off the code; return the rest, and those functions by name."""
    lines, functions = code.splitlines(), {}
    for node in reversed(ast.parse(code).body):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            functions[node.name] = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            del lines[node.lineno - 1 : node.end_lineno]
    return "\n".join(lines).strip(), functions


def _submit(new: list[dict[str, Any]], answers: dict[str, str], folder: Path, released: Path) -> None:
    """Insert cells before the first solution cell of the released notebook, and replace stubs with answers."""
    notebook, cells = read_notebook(released)
    for name, source in answers.items():
        cells[name]["source"] = source
    first = next(i for i, cell in enumerate(notebook["cells"]) if cell["metadata"].get("nbgrader", {}).get("solution"))
    notebook["cells"][first:first] = new
    (folder / released.name).write_text(json.dumps(notebook))


def read_notebook(released: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """A notebook as JSON, and its cells by grade id."""
    notebook = json.loads(released.read_text())
    return notebook, {cell["metadata"].get("nbgrader", {}).get("grade_id"): cell for cell in notebook["cells"]}


def code_cell(ident: str, source: str) -> dict[str, Any]:
    """A code cell of a notebook's JSON."""
    return {"cell_type": "code", "id": ident, "metadata": {}, "source": source, "outputs": [], "execution_count": None}

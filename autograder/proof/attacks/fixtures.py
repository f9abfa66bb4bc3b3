"""The attacks as they lie in the folders, and a course folder in which each is handed in."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autograder.contract.task import load
from autograder.contract.verdict import FAIL, LIMIT_EXCEEDED, NEEDS_HUMAN, PARTIAL, PASS, REFUSED, STUDENT_ERROR
from autograder.grading.nbgrader.course import HIDDEN, make_course
from course.curriculum import CHAPTERS

HERE = Path(__file__).parent
CHAPTER = "fsdp"
VERDICTS = (PASS, PARTIAL, FAIL, STUDENT_ERROR, LIMIT_EXCEEDED, REFUSED, NEEDS_HUMAN)
GROUPS = {
    "reads": "reads what it must not",
    "forges": "forges a result",
    "tampers": "tampers",
    "exhausts": "exhausts",
    "reaches": "reaches people",
}
HEADER = ("group", "chapter", "functions", "control", "points", "rungs", "uses")
KITS = "kits"
NEIGHBOUR = "neighbour"
_CELL = re.compile(r"^# %%(?: \[([\w-]+)\])?[ \t]*$", re.MULTILINE)


class FixtureError(Exception):
    """A fixture is not as the package's docstring says; the message names its file."""


@dataclass(frozen=True)
class Attack:
    """One fixture. ``says`` is the first paragraph of its docstring; ``control`` is empty where it is tried on stock
    nbgrader, else the reason why not.
    """

    name: str
    verdict: str
    file: Path
    says: str
    group: str
    functions: tuple[str, ...]
    control: str
    points: float | None = None
    rungs: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    chapter: str = CHAPTER


def find_attacks(root: Path = HERE) -> list[Attack]:
    """Every fixture, in order of group and name.

    Raises:
        FixtureError: one is malformed, or two have the same name.
    """
    folders = [folder for verdict in sorted(root.iterdir()) if _is_fixture(verdict) for folder in verdict.iterdir()]
    attacks = [_read(folder) for folder in sorted(folders) if _is_fixture(folder)]
    names = [attack.name for attack in attacks]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise FixtureError(f"two fixtures have the same name: {', '.join(twice)}")
    return sorted(attacks, key=lambda attack: ([*GROUPS].index(attack.group), attack.name))


def _is_fixture(folder: Path) -> bool:
    return folder.is_dir() and folder.name != KITS and not folder.name.startswith(("__", "."))


def _read(folder: Path) -> Attack:
    verdict = folder.parent.name
    if verdict not in VERDICTS:
        raise FixtureError(f"{folder.parent} is not the name of a verdict: {', '.join(VERDICTS)}")
    files = sorted(path for path in folder.iterdir() if path.name in ("attack.py", "submit.py"))
    if len(files) != 1:
        raise FixtureError(f"{folder} must hold either attack.py or submit.py, and holds {len(files)} of them")
    text = files[0].read_text(encoding="utf-8")
    says, header = _docstring(files[0], ast.get_docstring(ast.parse(text)) or "")
    control = header["control"]
    if control != "yes" and not control.startswith("no: "):
        raise FixtureError(f"{files[0]}: control is {control!r}, expected 'yes' or 'no: why'")
    chapter = header.get("chapter", CHAPTER)
    if chapter not in {known.name for known in CHAPTERS}:
        raise FixtureError(f"{files[0]}: there is no chapter {chapter}")
    known = [task.name for task in load(chapter).tasks]
    functions = _words(header.get("functions", "")) or tuple(n for n, _ in _cells(text) if n in known) or tuple(known)
    if unknown := set(functions) - set(known):
        raise FixtureError(f"{files[0]}: {chapter} has no function {', '.join(sorted(unknown))}")
    points = float(header["points"]) if "points" in header else None
    if (points is not None) != (verdict == PARTIAL):
        raise FixtureError(f"{files[0]}: a fixture says what points it earns if, and only if, its verdict is partial")
    return Attack(
        name=folder.name,
        verdict=verdict,
        file=files[0],
        says=says,
        group=header["group"],
        functions=functions,
        control=control.partition(": ")[2],
        points=points,
        rungs=_words(header.get("rungs", "")),
        uses=_words(header.get("uses", "")),
        chapter=chapter,
    )


def _docstring(file: Path, text: str) -> tuple[str, dict[str, str]]:
    paragraph, _, rest = text.partition("\n\n")
    header: dict[str, str] = {}
    for line in rest.strip().split("\n"):
        name, colon, value = line.partition(":")
        if not colon or name.strip() not in HEADER:
            raise FixtureError(f"{file}: {line!r} is not a header line; they are {', '.join(HEADER)}")
        header[name.strip()] = value.strip()
    if not paragraph or header.get("group") not in GROUPS or "control" not in header:
        raise FixtureError(f"{file}: the docstring needs a paragraph, a group ({', '.join(GROUPS)}) and a control")
    return " ".join(paragraph.split()), header


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.replace(",", " ").split())


def _cells(text: str) -> list[tuple[str, str]]:
    """The cells of a file in percent format: grade id or nothing, and source. What stands before them is left out."""
    parts = _CELL.split(text)
    return [(name or "", source.strip("\n")) for name, source in zip(parts[1::2], parts[2::2], strict=True)]


def answered(released: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The released notebook with a right ``shard_params``, for a submission to change; and its cells by grade id."""
    notebook = json.loads(released.read_text())
    cells = {cell["metadata"].get("nbgrader", {}).get("grade_id"): cell for cell in notebook["cells"]}
    source = (HERE / "kits" / "honest.py").read_text()
    cells["shard_params"]["source"] = f"{source}\n\nshard_params = right_shards"
    return notebook, cells


def submit(attack: Attack, course: Path) -> None:
    """Hand the attack in, in a course folder that has a release."""
    released = course / "release" / attack.chapter / f"{attack.chapter}.ipynb"
    folder = course / "submitted" / attack.name / attack.chapter
    folder.mkdir(parents=True)
    if attack.file.name == "attack.py":
        (folder / released.name).write_text(json.dumps(_notebook(attack, json.loads(released.read_text()))))
        return
    spec = importlib.util.spec_from_file_location(f"hostile_{attack.name}", attack.file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.submit(folder, released)


def _notebook(attack: Attack, notebook: dict[str, Any]) -> dict[str, Any]:
    cells = notebook["cells"]
    place = {cell["metadata"].get("nbgrader", {}).get("grade_id"): cell for cell in cells}
    new = [code_cell(kit, (HERE / KITS / f"{kit}.py").read_text(encoding="utf-8")) for kit in attack.uses]
    for number, (name, source) in enumerate(_cells(attack.file.read_text(encoding="utf-8")), 1):
        if not name:
            new.append(code_cell(f"attack-{number}", source))
        elif name in place:
            place[name]["source"] = source
        else:
            raise FixtureError(f"{attack.file}: the released notebook has no cell {name!r}")
    first = next(i for i, cell in enumerate(cells) if cell["metadata"].get("nbgrader", {}).get("solution"))
    return {**notebook, "cells": [*cells[:first], *new, *cells[first:]]}


def code_cell(ident: str, source: str) -> dict[str, Any]:
    """A code cell of a notebook's JSON."""
    return {"cell_type": "code", "id": ident, "metadata": {}, "source": source, "outputs": [], "execution_count": None}


def prepare(folder: Path, attacks: list[Attack]) -> Path:
    """A course folder with canaries, a neighbour, and each attack handed in."""
    from autograder.proof.attacks.canaries import NEIGHBOURS, SECRET

    course = make_course(folder, sorted({CHAPTER, *(attack.chapter for attack in attacks)}))
    (course / HIDDEN / "secret").write_bytes(SECRET)
    released = json.loads((course / "release" / CHAPTER / f"{CHAPTER}.ipynb").read_text())
    theirs = course / "submitted" / NEIGHBOUR / CHAPTER / f"{CHAPTER}.ipynb"
    theirs.parent.mkdir(parents=True)
    released["cells"].append(code_cell("mine", f"ANSWER = {NEIGHBOURS!r}"))
    theirs.write_text(json.dumps(released))
    for attack in attacks:
        submit(attack, course)
    return course

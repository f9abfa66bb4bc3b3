"""All attacks, and a course folder in which each is submitted."""

from __future__ import annotations

import json
from pathlib import Path

from autograder.grading.nbgrader.course import HIDDEN, make_course
from autograder.proof.attacks.canaries import NEIGHBOURS, SECRET
from autograder.proof.attacks.declared import CELLS, CHAPTER, GROUPS, Attack, AttackError, code_cell, read_attacks
from autograder.proof.attacks.submissions import SUBMISSIONS

NEIGHBOUR = "neighbour"


def find_attacks(folder: Path = CELLS) -> list[Attack]:
    """Every attack, in order of group and name.

    Raises:
        AttackError: one is malformed, or two have the same name.
    """
    attacks = [*read_attacks(folder), *SUBMISSIONS]
    names = [attack.name for attack in attacks]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise AttackError(f"two attacks have the same name: {', '.join(twice)}")
    return sorted(attacks, key=lambda attack: ([*GROUPS].index(attack.group), attack.name))


def prepare(folder: Path, attacks: list[Attack]) -> Path:
    """A course folder with canaries, a neighbour, and a submission of each attack."""
    course = make_course(folder, sorted({CHAPTER, *(attack.chapter for attack in attacks)}))
    (course / HIDDEN / "secret").write_bytes(SECRET)
    released = json.loads((course / "release" / CHAPTER / f"{CHAPTER}.ipynb").read_text())
    neighbour_path = course / "submitted" / NEIGHBOUR / CHAPTER / f"{CHAPTER}.ipynb"
    neighbour_path.parent.mkdir(parents=True)
    released["cells"].append(code_cell("mine", f"ANSWER = {NEIGHBOURS!r}"))
    neighbour_path.write_text(json.dumps(released))
    for attack in attacks:
        submit(attack, course)
    return course


def submit(attack: Attack, course: Path) -> None:
    """Submit the attack in a course folder that has a release."""
    folder = course / "submitted" / attack.name / attack.chapter
    folder.mkdir(parents=True)
    attack.submit(folder, course / "release" / attack.chapter / f"{attack.chapter}.ipynb")

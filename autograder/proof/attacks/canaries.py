"""Recognisable stand-ins for everything that no student may ever see, and a search for them."""

from __future__ import annotations

import base64
import html
import json
import re
from functools import cache

import jax
import numpy as np

from autograder.contract.task import load
from autograder.grading.outside import judge
from autograder.grading.outside.judge import plan
from autograder.proof.attacks.declared import Attack
from autograder.release.notebook import BEGIN, END
from course.curriculum import ROOT

SECRET = b"canary-of-the-courses-own-secret"
NEIGHBOURS = "canary-in-another-students-notebook"
VARIABLE, IN_VARIABLE = "MESHCRAFT_CANARY", "canary-in-the-environment"
# Magic bytes of gradebook and ledger files.
DATABASE = "SQLite format 3"
_NUMBER = re.compile(r"-?\d+\.\d{4,}(?:e-?\d+)?")
# A failed fact shows the single element that differs most, measured and expected.
SHOWN = 8


def search(text: str, attack: Attack, submission: bytes, digest: str, released: str) -> list[str]:
    """The names of the canaries that occur in the text.

    Args:
        text: Text that a student could see.
        attack: The attack that produced it.
        submission: The submitted notebook; its own content does not count as a find.
        digest: The submission's hash, which determines the official inputs.
        released: The notebook that students were given.
    """
    text = html.unescape(text).replace('\\"', '"').replace("\\\\", "\\")
    own = "\n".join(_sources(submission))
    secrets = (SECRET.decode(), SECRET.hex(), base64.b64encode(SECRET).decode(), str(list(SECRET)))
    tasks = [task for task in load(attack.chapter).tasks if task.name in attack.functions]
    seeds = [plan(attack.chapter, task, secret=SECRET, submission=digest).seed for task in tasks]
    shown = {_rounded(number) for number in _NUMBER.findall(text)}
    many = len(shown) > SHOWN
    occurs = {
        "the course's secret": any(secret in text for secret in secrets),
        "another student's notebook": NEIGHBOURS in text,
        "a database": DATABASE in text and DATABASE not in own,
        "the environment": IN_VARIABLE in text,
        "the solution": any(line in text for line in _solution_lines(attack.chapter, released) if line not in own),
        "the seed of the official inputs": any(f"{seed}" in text or f"{seed:x}" in text for seed in seeds),
        "the official inputs": many
        and any(len(shown & _drawn(attack.chapter, task.name, digest)) > SHOWN for task in tasks),
    }
    return [name for name, seen in occurs.items() if seen]


def _sources(submission: bytes) -> list[str]:
    """The cells' sources of a notebook; text that is not a notebook is returned unchanged."""
    try:
        return ["".join(cell["source"]) for cell in json.loads(submission)["cells"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return [submission.decode(errors="replace").replace('\\"', '"')]


@cache
def _solution_lines(chapter: str, released: str) -> tuple[str, ...]:
    text = (ROOT / "solutions" / f"{chapter}.py").read_text(encoding="utf-8")
    regions = re.findall(f"{BEGIN}\n(.*?){END}", text, re.DOTALL)
    lines = {line.strip(" #") for region in regions for line in region.splitlines()}
    known = "\n".join(_sources(released.encode()))
    return tuple(sorted(line for line in lines if len(line) > 25 and line not in known))


@cache
def _drawn(chapter: str, name: str, digest: str) -> frozenset[str]:
    """Inputs and expected values of a submission, on the first case and on the unseen one."""
    task = load(chapter).task(name)
    planned = plan(chapter, task, secret=SECRET, submission=digest)
    arrays = [judge.expected(planned, case) for case in (planned.cases[0], planned.cases[-1])]
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(arrays)]
    return frozenset(_rounded(number) for leaf in leaves if leaf.dtype.kind == "f" for number in leaf.flat)


def _rounded(number: str | float) -> str:
    return f"{float(number):.5g}"

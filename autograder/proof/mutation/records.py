"""The survey's results by chapter: counts by function, and for each survivor why it is not a wrong answer."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path

import msgspec

from autograder.contract.task import load
from autograder.proof.mutation.operators import name_of, normalised
from autograder.proof.mutation.survey import BROKEN, EQUAL, SURVIVED, Outcome


class Survivor(msgspec.Struct, frozen=True):
    """A mutation that no fact rejects: the function, its lines before (``- ``) and after (``+ ``).

    ``why`` explains why it is not a wrong answer. A person writes it; it is empty until then. It begins with ``HOLE``
    if the contract should reject the mutation and does not yet.
    """

    function: str
    edit: tuple[str, ...]
    why: str = ""

    @property
    def name(self) -> str:
        return name_of(self.function, self.edit)

    @property
    def explained(self) -> bool:
        return bool(self.why) and not self.why.startswith("HOLE")


class Record(msgspec.Struct, frozen=True):
    """Outcomes of a function's mutations: how many raise an exception, give the same program, or are rejected.

    ``rejected`` counts them by kind of fact or verdict; ``possible`` includes those that were not tried.
    """

    possible: int
    broken: int
    equal: int
    rejected: dict[str, int]
    survivors: tuple[Survivor, ...]

    @property
    def killed(self) -> int:
        return sum(self.rejected.values())

    @property
    def judged(self) -> int:
        return self.killed + len(self.survivors)

    @property
    def unexplained(self) -> list[str]:
        return [f"{each.why or 'unexplained'}: {each.name}" for each in self.survivors if not each.explained]


def path_of(chapter: str) -> Path:
    """The file of a chapter's records."""
    return Path(__file__).with_name(f"{chapter}.json")


def read(chapter: str) -> dict[str, Record]:
    """The records of a chapter by function; empty where there are none."""
    path = path_of(chapter)
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Record]) if path.exists() else {}


def keep(chapter: str, function: str, record: Record) -> None:
    """Put a function's record into the chapter's file."""
    records = {**read(chapter), function: record}
    known = [task.name for task in load(chapter).tasks]
    plain = {name: msgspec.to_builtins(records[name]) for name in known if name in records}
    path_of(chapter).write_text(json.dumps(plain, indent=1, ensure_ascii=False) + "\n")


def recorded(outcomes: list[Outcome], possible: int, before: Record | None) -> Record:
    """A whole survey as a record, which keeps earlier explanations of survivors."""
    known = {survivor.name: survivor for survivor in before.survivors} if before else {}
    counts = Counter(outcome.result for outcome in outcomes)
    rejected = {name: n for name, n in sorted(counts.items()) if name not in (BROKEN, EQUAL, SURVIVED)}
    surviving = [outcome for outcome in outcomes if outcome.result == SURVIVED]
    survivors = tuple(known.get(outcome.name, Survivor(outcome.function, outcome.edit)) for outcome in surviving)
    return Record(possible, counts[BROKEN], counts[EQUAL], rejected, survivors)


def judged_again(outcomes: list[Outcome], before: Record) -> Record:
    """A record after its survivors were judged again: some may now be rejected."""
    left = {outcome.name for outcome in outcomes if outcome.result == SURVIVED}
    rejected = Counter(before.rejected) + Counter(o.result for o in outcomes if o.result != SURVIVED)
    survivors = tuple(survivor for survivor in before.survivors if survivor.name in left)
    return msgspec.structs.replace(before, rejected=dict(sorted(rejected.items())), survivors=survivors)


def stale(chapter: str) -> list[str]:
    """The survivors whose code no longer matches the solution's."""
    module, problems = importlib.import_module(f"solutions.{chapter}"), []
    for name, record in read(chapter).items():
        for survivor in record.survivors:
            function = getattr(module, survivor.function, None)
            code = {line.strip() for line in normalised(function).splitlines()} if function else set()
            if any(line.startswith("- ") and line[2:] not in code for line in survivor.edit):
                problems.append(f"{name}'s code has changed since this survivor was recorded: {survivor.name}")
    return problems

"""The share of code that two authors have in common, and its rarity: code that everyone writes is no evidence."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix, diags_array

from autograder.similarity.sources import Written

FLOOR = 0.4
ALIKE = 0.8
# Fewer fingerprints than this are a line or two, which people write alike.
LEAST = 10
# The weight of an equivalent Program, however rare: right answers to a small function compute the same.
PROGRAM = 0.5


@dataclass(frozen=True)
class Match:
    """Two authors of one function, the first of them from this class.

    Attributes:
        function: Its name.
        first: The first author's code.
        second: The second author's code.
        share: Fraction of the shorter one that the other has as well, from 0 to 1.
        rarity: Rarity of the shared code, from 0 to 1, where 1 means that nobody else has it.
        others: Number of others of this and earlier classes that have the shared code: the median.
        in_public: Fraction of the shared code that is in public code as well, from 0 to 1.
        program: True if the Programs are equivalent; None if one of them is unknown.
        program_others: Number of others with an equivalent Program.
    """

    function: str
    first: Written
    second: Written
    share: float
    rarity: float
    others: float
    in_public: float
    program: bool | None
    program_others: int
    score: float

    @property
    def program_text(self) -> str:
        """The comparison of the Programs in words; empty if there is none."""
        if not self.program:
            return "" if self.program is None else "another"
        return f"the same, like {self.program_others} others'" if self.program_others else "the same"

    def to_json(self) -> dict[str, Any]:
        """Plain data, without the sources."""
        authors = {name: _author(written) for name, written in (("first", self.first), ("second", self.second))}
        figures = ("share", "rarity", "others", "in_public", "score")
        program = {"same": self.program, "others": self.program_others if self.program else None}
        rounded = {name: round(getattr(self, name), 3) for name in figures}
        return {"function": self.function, **authors, **rounded, "program": program}


@dataclass(frozen=True)
class Compared:
    """A function's matches, the strongest first.

    ``usual`` is the median share of two authors of this class, and ``like_public`` the number of authors that share at
    least ``ALIKE`` with public code, rare or not. ``frequencies`` counts, for each fingerprint, how many of the
    ``people`` of this and earlier classes have it.
    """

    function: str
    authors: int
    matches: list[Match]
    usual: float | None
    like_public: int
    frequencies: Mapping[int, int]
    people: int

    def rarity(self, match: Match, gram: int) -> float:
        """The rarity of a fingerprint among the authors outside this match."""
        return _rarity(self.frequencies[gram] - (1 if match.second.author.public else 2), self.people)


def compare(function: str, everyone: Sequence[Written], floor: float = FLOOR) -> Compared:
    """Compare everyone of this class with one another, with earlier classes and with public code."""
    ours = [w for w in everyone if not (w.author.public or w.author.where)]
    written = [*ours, *(w for w in everyone if w.author.public or w.author.where)]
    people = [w for w in written if not w.author.public]
    frequencies = Counter(gram for w in people for gram in w.grams)
    forms = Counter(w.form for w in people)
    public = {gram for w in written if w.author.public for gram in w.grams}
    shares, scores = _scores(ours, written, frequencies, len(people))
    matches = []
    for i, first in enumerate(ours):
        for j in range(i + 1, len(written)):
            second = written[j]
            same = first.form == second.form if first.form and second.form else None
            alone = 0 if second.author.public else 1
            fellows = forms[first.form] - 1 - alone if same else 0
            score = max(scores[i, j], PROGRAM * _rarity(fellows, len(people)) if same else 0.0)
            if score < floor or first.author.name == second.author.name:
                continue
            shared = first.grams.keys() & second.grams.keys()
            counts = [frequencies[gram] - 1 - alone for gram in shared]
            rarity = math.fsum(_rarity(count, len(people)) for count in counts) / max(1, len(counts))
            in_public = len(shared & public) / max(1, len(shared))
            others = float(median(counts)) if counts else 0.0
            matches.append(
                Match(function, first, second, float(shares[i, j]), rarity, others, in_public, same, fellows, score)
            )
    matches.sort(key=lambda match: (-match.score, match.first.author, match.second.author))
    pairs = shares[:, : len(ours)][np.triu_indices(len(ours), 1)]
    usual = float(np.median(pairs)) if len(pairs) > 1 else None
    like_public = sum(
        any(shares[i, j] >= ALIKE for j, w in enumerate(written) if w.author.public and _enough(first, w))
        for i, first in enumerate(ours)
    )
    return Compared(function, len(ours), matches, usual, like_public, frequencies, len(people))


def _scores(ours: list[Written], written: list[Written], frequencies: Counter[int], people: int) -> tuple[Any, Any]:
    """The fraction of the shorter code that two authors share, ``[ours, written]``, and the same weighted by rarity."""
    columns = {gram: number for number, gram in enumerate({gram for w in written for gram in w.grams})}
    row = np.repeat(np.arange(len(written)), [len(w.grams) for w in written])
    column = [columns[gram] for w in written for gram in w.grams]
    has = csr_matrix((np.ones(len(row)), (row, column)), shape=(len(written), max(1, len(columns))))
    length = np.array([len(w.grams) for w in written])
    shorter = np.maximum(1, np.minimum(length[: len(ours), None], length[None]))
    first, transposed = has[: len(ours)], has.T.tocsr()
    weighted = np.zeros((len(ours), len(written)))
    open_to_all = np.array([w.author.public for w in written], bool)
    for two, which in ((1, ~open_to_all), (0, open_to_all)):
        weight = [_rarity(frequencies[gram] - 1 - two, people) for gram in columns] or [0.0]
        weighted[:, which] = (first @ diags_array(weight) @ transposed[:, which]).toarray()
    return (first @ transposed).toarray() / shorter, np.where(shorter >= LEAST, weighted / shorter, 0.0)


def _enough(first: Written, second: Written) -> bool:
    return min(len(first.grams), len(second.grams)) >= LEAST


def _rarity(others: int, people: int) -> float:
    """1 if nobody else has it, 0 if everyone has."""
    return 1.0 if others <= 0 else max(0.0, 1 - math.log(1 + others) / math.log(max(2, people)))


def _author(written: Written) -> dict[str, Any]:
    kind = "public" if written.author.public else "earlier" if written.author.where else "class"
    return {"name": written.author.name, "kind": kind, "course": written.author.where or None}

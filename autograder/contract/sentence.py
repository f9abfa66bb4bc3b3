"""A sentence about a result, and its subject: other sentences depend on the subject, never on the words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class About(StrEnum):
    """The subject of a sentence."""

    SUM_OR_MEAN = "a factor that a size of the case has"
    DTYPE = "the dtype that is sent"
    FIRST_LOSS = "a loss that is wrong before any update"
    LATER_LOSSES = "losses that are wrong after an update only"
    WRONG_GRADIENTS = "values that follow from wrong gradients"
    ADDED = "an input that is added too often, or not at all"
    ROUNDING = "small errors nearly everywhere"
    MASKS = "masks that may be wrong"
    RIGHT_MASKS = "masks that are right"
    ALWAYS_DROPS = "dropout in every case"
    NOT_FINITE = "why a number is not finite"


@dataclass(frozen=True)
class Sentence:
    """A sentence, empty if there is nothing to say, and its subjects."""

    text: str = ""
    about: tuple[About, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text)

    def then(self, text: str) -> Sentence:
        """Append another sentence; the subjects stay the same."""
        return Sentence(f"{self.text} {text}".strip(), self.about)

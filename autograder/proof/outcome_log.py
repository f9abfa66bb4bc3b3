"""Logs of outcomes, one JSON object per line, from which a stopped run resumes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

Outcome = TypeVar("Outcome")


def logged(log: Path, kind: type[Outcome]) -> list[Outcome]:
    """The outcomes that an earlier run logged, without a line that was cut off when it stopped."""
    outcomes = []
    for line in log.read_text().splitlines() if log.exists() else ():
        with suppress(msgspec.DecodeError):
            outcomes.append(msgspec.json.decode(line, type=kind))
    return outcomes

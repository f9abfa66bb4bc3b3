"""Logs of outcomes, one JSON object a line, from which a run that was stopped goes on."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

Outcome = TypeVar("Outcome")


def logged(log: Path, kind: type[Outcome]) -> list[Outcome]:
    """What an earlier run logged, without a line cut off when it was stopped."""
    found = []
    for line in log.read_text().splitlines() if log.exists() else ():
        with suppress(msgspec.DecodeError):
            found.append(msgspec.json.decode(line, type=kind))
    return found

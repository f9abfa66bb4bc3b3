"""Rows of measurements in one file per kind of device: measured in groups, saved at once, resumable later."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course.measured import fresh
from course.measured.card import file_name, write

FOLDER = Path(__file__).resolve().parents[1] / "measurements"
NOT_MEASURED = "not measured"
# A process that takes longer than this has hung, or the row is too large for the machine.
LONGEST = 400.0


@dataclass(frozen=True)
class Group:
    """Rows that one process measures: their names, and a function that measures them and returns figures by name."""

    rows: tuple[str, ...]
    measure: Callable[[float, str], dict[str, dict[str, Any]]]


def say(text: str) -> None:
    """Print a progress line."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Report:
    """Progress callbacks of ``measure_all``: ``text`` takes a line, and ``done`` is called after each group."""

    text: Callable[[str], None] = say
    done: Callable[[], None] = lambda: None


def measure_all(
    card: dict[str, Any],
    path: Path,
    groups: list[Group],
    *,
    again: bool,
    deadline: float,
    platform: str = "",
    report: Report = Report(),
) -> list[str]:
    """Measure the groups in turn and save each in ``path`` at once; returns the rows that are not measured.

    Args:
        card: Description of the devices measured on.
        path: The file for this kind of device.
        groups: The groups to measure.
        again: Measure rows that already exist, too.
        deadline: On ``time.monotonic()``; no group starts after it, and one that runs past it is ended.
        platform: As for ``fresh.ask``.
        report: Progress callbacks.
    """
    data = read(path, card)
    rows = data["rows"]
    for i, group in enumerate(groups, 1):
        for name in group.rows:
            rows.setdefault(name, {NOT_MEASURED: "not tried yet"})
        missing = [name for name in group.rows if again or NOT_MEASURED in rows[name]]
        left = deadline - time.monotonic()
        label = f"[{i}/{len(groups)}] {group.rows[0]}" + (f" and {len(group.rows) - 1} more" if group.rows[1:] else "")
        if not missing or left <= 0:
            report.text(f"{label}: {'already there' if not missing else 'no time left'}")
            report.done()
            continue
        report.text(f"{label} ...")
        start = time.monotonic()
        for name, figures in _figures(group, min(left, LONGEST), platform).items():
            if name in missing and (NOT_MEASURED not in figures or NOT_MEASURED in rows[name]):
                rows[name] = figures if NOT_MEASURED in figures else {**figures, "card": _card_index(data, card)}
            report.text(f"    {name}: {summary(figures)}")
        report.text(f"    {time.monotonic() - start:.0f} s")
        write(path, data)
        report.done()
    write(path, data)
    return [name for group in groups for name in group.rows if NOT_MEASURED in rows[name]]


def _figures(group: Group, seconds: float, platform: str) -> dict[str, dict[str, Any]]:
    try:
        return group.measure(seconds, platform)
    except fresh.MeasurementFailed as error:
        return {name: {NOT_MEASURED: str(error)} for name in group.rows}


def summary(figures: dict[str, Any]) -> str:
    """Summarise a row in a few words, for progress output."""
    if NOT_MEASURED in figures:
        return f"{NOT_MEASURED}: {figures[NOT_MEASURED]}"
    if "rate" in figures:
        scale, unit = (1e12, "TFLOP/s") if figures["unit"] == "FLOP/s" else (1e9, "GB/s")
        return f"{figures['rate'] / scale:.4g} {unit}"
    memory = "memory not measured" if figures["bytes"] is None else f"{figures['bytes'] / 1e9:.4g} GB at the peak"
    parts = [f"{figures['seconds']:.4g} s a step", memory]
    if "tokens_per_second" in figures:
        mfu = figures["mfu"]
        parts += [
            f"{figures['tokens_per_second']:,.0f} tokens/s",
            "no MFU" if mfu is None else f"MFU {100 * mfu:.1f}%",
        ]
    return ", ".join(parts)


def read(path: Path, card: dict[str, Any]) -> dict[str, Any]:
    """The contents of the file for a card's kind, without rows if there is no file.

    Raises:
        ValueError: The file belongs to another kind of device.
    """
    data = json.loads(path.read_text()) if path.exists() else {"kind": card["kind"], "cards": [], "rows": {}}
    if data["kind"] != card["kind"]:
        raise ValueError(f"{path.name} is for {data['kind']!r} and this is {card['kind']!r}: name another --folder")
    return data


def recorded_rows(kind: str) -> dict[str, dict[str, Any]]:
    """The rows that the course has recorded for a kind of device, by name; none if there is no file for it."""
    path = FOLDER / file_name(kind)
    return json.loads(path.read_text())["rows"] if path.exists() else {}


def _card_index(data: dict[str, Any], card: dict[str, Any]) -> int:
    """Index of this card among those that rows were measured with; a new one is appended."""
    if card not in data["cards"]:
        data["cards"].append(card)
    return data["cards"].index(card)

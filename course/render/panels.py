"""Predictions as HTML for notebooks: pictures and tables, without scripts, style sheets or external addresses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from course.render import memory_svg, side_by_side
from course.render.captions import HOW_TO_READ, conclusion
from course.render.svg import safe
from course.render.tables import Section, comparison, heading, sections

if TYPE_CHECKING:
    from course.prediction import Prediction

_OUTER = "font-family:system-ui,sans-serif;font-size:13px;line-height:1.5;color:inherit;text-align:left;"
_CELL = "padding:2px 14px 2px 0;vertical-align:top;border:none;white-space:nowrap;"
_HEAD = "white-space:normal;vertical-align:bottom;"
_RULE = "border-top:1px solid rgba(128,128,128,0.35);"
_FAINT = "opacity:0.75;"
_SCROLL = "overflow-x:auto;margin:8px 0 12px 0;"
_TABLE = "border-collapse:collapse;border:none;margin:0;font-size:13px;color:inherit;"


def prediction_html(prediction: Prediction) -> str:
    """One prediction: its timeline, its figures, its memory, and a collapsed breakdown of its time."""
    parts = [
        f"<div><b>{safe(heading(prediction))}</b></div>",
        *_timelines({"": prediction}, ""),
        _table(comparison({"": prediction})),
        *_remarks(prediction.remarks),
        _memory(prediction),
        *(_folded(section) for section in sections(prediction)),
    ]
    return _whole(parts)


def comparison_html(
    title: str, predictions: Mapping[str, Prediction], remarks: Mapping[str, str] | None = None, *, reference: str = ""
) -> str:
    """Several predictions on one time scale, their figures side by side, and the first one's memory and lines.

    Args:
        title: Subject of the predictions.
        predictions: Predictions by display name; the first is the reader's own.
        remarks: The reasons why others are missing, by name.
        reference: Name of the prediction that sets the time scale, as for ``side_by_side``; the first one if it is
            missing.
    """
    first = next(iter(predictions))
    own = predictions[first]
    parts = [
        f"<div><b>{safe(title)}</b></div>",
        *_timelines(predictions, reference if reference in predictions else first),
        _table(comparison(predictions)),
        *_remarks(remarks or {}),
        *(_folded(Section(f"memory: {name}", (), ()), _memory(p)) for name, p in predictions.items()),
        *(_folded(section) for section in sections(own)),
    ]
    return _whole(parts)


def _timelines(predictions: Mapping[str, Prediction], reference: str) -> list[str]:
    """The picture, the conclusion for the first timeline, and how to read it; a sentence if nothing takes time."""
    first = next(iter(predictions.values()))
    sentence = f'<div style="margin:4px 0 8px 0;">{safe(conclusion(first.timeline))}</div>'
    if all(prediction.idle for prediction in predictions.values()):
        return [sentence]
    picture = side_by_side({name: p.timeline for name, p in predictions.items()}, reference=reference)
    return [_scrolling(picture), sentence, _folded(Section("How to read this", (), ()), _how_to_read())]


def _how_to_read() -> str:
    terms = "".join(
        f'<dt style="font-weight:600;">{safe(term)}</dt><dd style="margin:0 0 4px 16px;">{safe(meaning)}</dd>'
        for term, meaning in HOW_TO_READ
    )
    return f'<dl style="margin:4px 0 8px 0;max-width:44rem;">{terms}</dl>'


def _remarks(remarks: Mapping[str, str]) -> list[str]:
    style = f"{_FAINT}white-space:pre-wrap;"
    return [f'<div style="{style}">{safe(name)}: {safe(why)}</div>' for name, why in remarks.items()]


def problem_html(title: str, message: str, line: str) -> str:
    """The reason why there is nothing to show."""
    where = f'<div style="{_FAINT}">your line {safe(line)}</div>' if line else ""
    style = "border-left:3px solid #cf222e;padding:2px 0 2px 10px;margin:4px 0 6px 0;white-space:pre-wrap;"
    return _whole([f"<div><b>{safe(title)}</b></div>", f'<div style="{style}">{where}{safe(message)}</div>'])


def page(title: str, inside: str) -> str:
    """A standalone file around a piece of HTML, light or dark according to the reader's system."""
    style = "body{margin:24px;max-width:1240px;color:#1b1f24;background:#fff}"
    dark = "@media(prefers-color-scheme:dark){body{color:#e6e8eb;background:#111}}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{safe(title)}</title>'
        f"<style>{style}{dark}</style></head><body>{inside}</body></html>\n"
    )


def _memory(prediction: Prediction) -> str:
    return _scrolling(memory_svg(prediction.memory, prediction.machine.memory_bytes))


def _whole(parts: list[str]) -> str:
    return f'<div style="{_OUTER}">{"".join(parts)}</div>'


def _scrolling(inside: str) -> str:
    return f'<div style="{_SCROLL}">{inside}</div>'


def _folded(section: Section, inside: str = "") -> str:
    summary = f'<summary style="cursor:pointer;">{safe(section.title)}</summary>'
    more = f'<div style="{_FAINT}">and {section.more} more</div>' if section.more else ""
    return f'<details style="margin:4px 0;">{summary}{inside or _table(section)}{more}</details>'


def _table(section: Section) -> str:
    numbers = [column.endswith(">") for column in section.columns]
    head = ""
    if any(section.columns):
        cells = zip(section.columns, numbers, strict=True)
        heads = "".join(f'<th style="{_CELL}{_HEAD}{_side(n)}{_FAINT}">{safe(c.rstrip(">"))}</th>' for c, n in cells)
        head = f'<thead style="border:none;"><tr style="background:none;">{heads}</tr></thead>'
    rows = "".join(_row(row, numbers) for row in section.rows)
    return f'<div style="{_SCROLL}"><table style="{_TABLE}">{head}<tbody>{rows}</tbody></table></div>'


def _row(row: tuple[str, ...], numbers: list[bool]) -> str:
    cells = zip(row, numbers, strict=True)
    return (
        '<tr style="background:none;">'
        + "".join(f'<td style="{_CELL}{_RULE}{_side(n)}">{safe(cell)}</td>' for cell, n in cells)
        + "</tr>"
    )


def _side(number: bool) -> str:
    return "text-align:right;font-variant-numeric:tabular-nums;" if number else "text-align:left;"

"""Render a judgement: as HTML in notebooks and feedback pages, as a table in a terminal.

Everything that came from a student is escaped here. The HTML has inline styles only, no scripts and no URLs,
and inherits its colours from the page, so that it is readable in light and dark themes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from autograder.contract.text import binary_units, count_of, join_words
from autograder.contract.verdict import (
    FAIL,
    LIMIT_EXCEEDED,
    NEEDS_HUMAN,
    NOT_MEASURED,
    PARTIAL,
    PASS,
    REFUSED,
    STUDENT_ERROR,
    Fact,
    Report,
    Result,
    Unit,
)

if TYPE_CHECKING:
    from jinja2 import Template

WORDS = {
    PASS: "pass",
    PARTIAL: "partial",
    FAIL: "fail",
    STUDENT_ERROR: "error",
    LIMIT_EXCEEDED: "limit exceeded",
    REFUSED: "refused",
    NEEDS_HUMAN: "needs a person",
}
COLOURS = {PASS: "#1a7f37", PARTIAL: "#9a6700", NEEDS_HUMAN: "#8250df"}
RED, GREY, NOT_STARTED = "#cf222e", "#6e7781", "not started"
RICH = {PASS: "green", PARTIAL: "yellow", NEEDS_HUMAN: "magenta"}
COLUMNS = ("fact", "case", "measured", "limit", "reference", "naive")
NUMBERS = range(2, len(COLUMNS))
ORIGINAL = "Original error"
NONE: Mapping[str, str] = {}
DENIED = "refused by the sandbox and reported"
LONGEST, WIDEST = 4000, 100
_WORD = re.compile(r"[^\s`]*(?:`[^`]*`[^\s`]*)+|\S+")

_CELL = "padding:3px 16px 3px 0;text-align:left;vertical-align:top;border:none;"
_WORDS = "min-width:6em;overflow-wrap:break-word;"
_NUMBER = "white-space:nowrap;font-variant-numeric:tabular-nums;"
_RULE = "border-top:1px solid rgba(128,128,128,0.35);"
_FAINT = "opacity:0.7;"
_APART = "margin-top:6px;"
_TEXT = "white-space:pre-wrap;overflow-wrap:anywhere;"
_MONO = "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:0.95em;"
_LINE = "background:rgba(207,34,46,0.16);border-radius:4px;padding:1px 6px;font-weight:600;"
_TABLE = "border-collapse:collapse;border:none;margin:0;min-width:min(36rem,100%);font-size:13px;color:inherit;"
# As wide as the columns need but never wider than the viewport: the message itself does not stretch the table.
_SCROLL = "overflow-x:auto;container-type:inline-size;"
_NOTE = "position:sticky;left:0;width:0;min-width:100%;min-width:min(100%,100cqw - 3rem);"


# What other modules call


def word_in_json(verdict: str) -> str:
    """A verdict as written in the JSON that learners read."""
    return "error" if verdict == STUDENT_ERROR else verdict


def facts_html(judgement: Report | Result) -> str:
    """The judgement as an HTML fragment without scripts, style sheets or URLs."""
    results = judgement.functions if isinstance(judgement, Report) else (judgement,)
    parts = [_result_html(result) for result in results]
    if isinstance(judgement, Report):
        parts.append(_report_foot(judgement))
    style = "font-family:system-ui,sans-serif;font-size:13px;line-height:1.5;color:inherit;text-align:left;"
    return f'<div style="{style}">{"".join(parts)}</div>'


def facts_table(judgement: Report | Result) -> Group:
    """The judgement for a terminal; print it with rich."""
    results = judgement.functions if isinstance(judgement, Report) else (judgement,)
    chapter = judgement.chapter if isinstance(judgement, Report) else "CHAPTER"
    parts = [part for result in results for part in _result_rich(result, chapter)]
    if isinstance(judgement, Report):
        parts += [_note_rich(note) for note in judgement.notes]
        if len(results) > 1:
            parts.append(Text(f"{number(judgement.points)} of {number(judgement.max_points)} points", style="bold"))
    return Group(*parts)


# Text that both forms share


class Prose:
    """Text for a terminal, broken between words and never within backticks, so that a command can be copied.

    A command longer than the line stays whole: print it with ``crop=False``. Lines that begin with spaces, such as
    those of a table, stay as they are.
    """

    def __init__(self, text: str, style: str = "", indent: int = 0):
        self.text, self.style, self.indent = plain(text), style, indent

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width, before = min(options.max_width, WIDEST) - self.indent, " " * self.indent
        for line in self.text.split("\n"):
            for part in [line] if line.startswith(" ") else _broken(line, width):
                yield Text(before + part, self.style, no_wrap=True, overflow="ignore")


def _broken(line: str, width: int) -> list[str]:
    """Break a line between words; text in backticks is one word, and other words longer than the line are cut."""
    lines = [""]
    for word in _WORD.findall(line):
        cut = range(0, len(word), width) if "`" not in word else ()
        for part in [word[at : at + width] for at in cut] or [word]:
            longer = f"{lines[-1]} {part}".lstrip()
            lines = [*lines[:-1], longer] if len(longer) <= width or not lines[-1] else [*lines, part]
    return lines


def _note_rich(note: str) -> RenderableType:
    """A note; a command at its end is on its own line, without backticks: print it with ``crop=False``."""
    before, command, *after = [*plain(note).split("`"), ""]
    if command.startswith("meshcraft ") and after == ["", ""]:
        return Text(f"{before.rstrip(' :')}:\n  {command}", style="dim", no_wrap=True, overflow="ignore")
    return Prose(note, "dim")


def page_template(path: Path, **filters: Callable[..., str]) -> Template:
    """A Jinja template of an HTML page, which escapes everything put into it."""
    from jinja2 import Environment, FileSystemLoader

    folder = FileSystemLoader(path.parent)
    environment = Environment(loader=folder, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= filters
    return environment.get_template(path.name)


def plain(text: object) -> str:
    """Strip control characters (terminal escapes, bidirectional overrides) and limit the length."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in str(text)[: LONGEST + 1])
    return shown if len(shown) <= LONGEST else shown[:LONGEST] + " …"


def one_line(text: object) -> str:
    """Like ``plain``, but without line breaks: for names and anything else that must not start a new line."""
    return plain(" ".join(str(text).split()))


def few(names: Collection[str], most: int = 4) -> str:
    """The first names, and how many more there are."""
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def number(value: float | str | None) -> str:
    """Format a measured value: short, and exact for whole numbers."""
    if value is None or isinstance(value, str):
        return plain(value or "")
    return f"{int(value):,}" if float(value).is_integer() else f"{value:.4g}"


def quantity(value: float, unit: str) -> str:
    """Format a number in a unit that the reader sees elsewhere; a large number of bytes in MiB or GiB."""
    return (binary_units(value) if unit == "bytes" else "") or number(value)


def _name(fact: Fact) -> tuple[str, str]:
    """The fact's name, and its unit if neither the name nor the figures show it."""
    name, unit = plain(fact.name), plain(fact.unit_text)
    unit = unit if unit not in name.split() and not _sizes(fact)[2] else ""
    weight_text = "half of the points" if fact.core and not fact.kind.required else "" if fact.weight else "advice"
    note = ", ".join(filter(None, (unit, weight_text)))
    return name, f"({note})" if note else ""


def _points(most: float) -> str:
    return f"{number(most)} point{'' if most == 1 else 's'}"


def _sizes(fact: Fact) -> tuple[str, ...]:
    """Columns of large byte counts in larger units; empty for any other number, or if rounding would hide a failure."""
    none = ("",) * len(COLUMNS)
    if fact.unit != Unit.BYTES:
        return none
    texts = fact.texts(lambda number: binary_units(number) if isinstance(number, int | float) else "")
    if fact.amiss and texts[0] in texts[1].split(" to "):
        return none
    return "", "", *(text if all(text.split(" to ")) else "" for text in texts)


def _values(fact: Fact) -> tuple[str, ...]:
    measured, *rest = fact.texts()
    return tuple(map(plain, (fact.name, fact.case, measured or NOT_MEASURED, *rest)))


def _mark(fact: Fact) -> str:
    return "–" if fact.passed is None else "✓" if fact.passed else "✗" if fact.weight else "!"


def _columns(facts: tuple[Fact, ...]) -> list[int]:
    """The columns that are filled for any fact; fact and measured are always included."""
    rows = [_values(fact) for fact in facts]
    return [i for i in range(len(COLUMNS)) if i in (0, 2) or any(row[i] for row in rows)]


def _message_in_facts(result: Result) -> bool:
    """Return True if a fact already carries the result's message."""
    return any((fact.message, fact.line) == (result.message, result.line) for fact in result.shown if not fact.passed)


# As HTML


def _html(text: str) -> str:
    return escape(text, quote=True)


def _result_html(result: Result) -> str:
    colour = GREY if result.not_started else COLOURS.get(result.verdict, RED)
    word = NOT_STARTED if result.not_started else WORDS.get(result.verdict, plain(result.verdict))
    badge = f"background:{colour};color:#fff;border-radius:10px;padding:1px 9px;font-size:12px;font-weight:600;"
    head = (
        f'<span style="{badge}">{_html(word)}</span> '
        f'<b style="{_MONO}">{_html(plain(result.name))}</b> '
        f'<span style="{_FAINT}">{number(result.points)} of {_points(result.max_points)}</span>'
    )
    remark = f"<div>{_html(plain(result.reason))}</div>" if result.reason else ""
    if not result.not_started and not _message_in_facts(result):
        remark += _remark(result.message, _line_html(result.line, result.quoted), colour)
    if result.original and not result.not_started:
        original = f'<pre style="{_TEXT}{_FAINT}">{_html(plain(result.original))}</pre>'
        remark += f'<details style="{_FAINT}"><summary>{ORIGINAL}</summary>{original}</details>'
    lines_below = "".join(f'<div style="{_FAINT}{_APART}">{_html(plain(line))}</div>' for line in _lines_below(result))
    rows, folded = _rows(result)
    tables = table_html(rows, quoted=result.quoted)
    if folded:
        tables += f'<details style="{_FAINT}"><summary>{_html(_others(folded))}</summary>{table_html(folded)}</details>'
    body = remark + tables + lines_below + _denied_html(result.denied)
    return f'<div style="margin:10px 0 14px 0;"><div style="margin-bottom:4px;">{head}</div>{body}</div>'


def _lines_below(result: Result) -> list[str]:
    """The lines below a table: the reference's figures, and the cases that were judged."""
    lines = [result.compared] if result.compared else []
    if result.verdict == PASS and result.cases:
        count, which = len(result.cases), "; ".join(result.cases)
        passes = f"Passes in all {count} cases" if count > 1 else "Passes in its one case"
        lines.append(f"{passes}; grading draws inputs of its own, and one more case. Here: {which}.")
    if result.verdict == PARTIAL and result.cases_left:
        judged = count_of(len(result.cases), "case")
        left = f"{result.cases_left} more {'is' if result.cases_left == 1 else 'are'}"
        lines.append(
            f"These points are for the first {judged}. Once everything passes there, {left} judged, and may fail."
        )
    return lines


def _remark(message: str, where: str, colour: str) -> str:
    if not message and not where:
        return ""
    text = f'<div style="{_TEXT}{_MONO}">{_html(plain(message))}</div>' if message else ""
    style = f"border-left:3px solid {colour};padding:2px 0 2px 10px;margin:4px 0 6px 0;"
    return f'<div style="{style}">{where}{text}</div>'


def whose(line: str) -> str:
    """Describe a line's owner; a gradient of the course's model is computed, and reduced, at the model's own lines."""
    return "the course's line" if line.startswith("course/") else "your line"


def _line_html(line: str, quoted: Mapping[str, str]) -> str:
    if not line:
        return ""
    located = f'<span style="{_FAINT}">{whose(line)}</span> <span style="{_MONO}{_LINE}">{_html(plain(line))}</span>'
    if text := quoted.get(line):
        located += f' <code style="{_MONO}{_TEXT}">{_html(plain(text))}</code>'
    return f'<div style="margin:2px 0;">{located}</div>'


def table_html(facts: tuple[Fact, ...], *, notes: bool = True, quoted: Mapping[str, str] = NONE) -> str:
    """Render the facts as a table.

    Args:
        facts: Its rows.
        notes: True to explain each failed fact below its row.
        quoted: The source text of the lines that the facts point to.
    """
    if not facts:
        return ""
    columns = _columns(facts)
    heads = "".join(f'<th style="{_CELL}{_FAINT}font-weight:normal;">{COLUMNS[i]}</th>' for i in columns)
    rows = "".join(_fact_html(fact, columns, notes, quoted) for fact in facts)
    head = f'<tr style="background:none;"><th style="{_CELL}width:1em;"></th>{heads}</tr>'
    table = f'<table style="{_TABLE}"><thead style="border:none;">{head}</thead><tbody>{rows}</tbody></table>'
    return f'<div tabindex="0" style="{_SCROLL}">{table}</div>'


def _fact_html(fact: Fact, columns: list[int], notes: bool, quoted: Mapping[str, str]) -> str:
    colour = {True: "#2da44e", False: "#e5534b" if fact.weight else "#bf8700", None: "inherit"}[fact.passed]
    mark = f'<td style="{_CELL}{_RULE}color:{colour};font-weight:700;">{_mark(fact)}</td>'
    cells = "".join(f'<td style="{_CELL}{_RULE}{_weight(i, fact)}">{_cell_html(i, fact)}</td>' for i in columns)
    row = f'<tr style="background:none;">{mark}{cells}</tr>'
    if not notes or fact.passed or not (fact.message or fact.line):
        return row
    message, *picture = _html(plain(fact.message)).split("\n")
    body = f'<div style="{_TEXT}">{message}</div>'
    if picture:
        body += f'<pre style="{_MONO}margin:2px 0;overflow-x:auto;">{chr(10).join(picture)}</pre>'
    text = f'<div style="{_NOTE}">{_line_html(fact.line, quoted)}{body}</div>'
    note = f'<td colspan="{len(columns)}" style="{_CELL}padding-bottom:8px;">{text}</td>'
    return f'{row}<tr style="background:none;"><td style="{_CELL}"></td>{note}</tr>'


def _cell_html(column: int, fact: Fact) -> str:
    if column == 0:
        name, unit = _name(fact)
        return f'{_html(name)} <span style="{_FAINT}">{_html(unit)}</span>'
    value, scaled = _values(fact)[column], _sizes(fact)[column]
    return f'{scaled}<br><span style="{_FAINT}font-weight:normal;">{_html(value)}</span>' if scaled else _html(value)


def _weight(column: int, fact: Fact) -> str:
    bold = "font-weight:600;" if column == 2 and fact.passed is False else ""
    return bold + (_NUMBER if column in NUMBERS and len(_values(fact)[column]) < 24 else _WORDS)


def _denied_html(denied: tuple[str, ...]) -> str:
    if not denied:
        return ""
    items = ", ".join(_html(plain(call)) for call in denied)
    return f'<div style="margin-top:4px;{_TEXT}"><span style="{_FAINT}">{DENIED}:</span> {items}</div>'


def _report_foot(report: Report) -> str:
    lines = [plain(note) for note in report.notes]
    if report.isolation:
        lines.append(f"judged under isolation: {plain(report.isolation)}")
    return "".join(f'<div style="{_FAINT}{_APART}">{_html(line)}</div>' for line in lines)


# In a terminal


def _result_rich(result: Result, chapter: str) -> list[RenderableType]:
    if result.not_started:
        name, points = plain(result.name), _points(result.max_points)
        return [Text.assemble((NOT_STARTED, "dim"), "  ", (name, "bold"), (f"  {points}", "dim")), ""]
    colour = RICH.get(result.verdict, "red")
    head = Text.assemble(
        (WORDS.get(result.verdict, plain(result.verdict)), f"bold {colour}"),
        "  ",
        (plain(result.name), "bold"),
        (f"  {number(result.points)} of {_points(result.max_points)}", "dim"),
    )
    parts: list[RenderableType] = [head, *([Prose(result.reason)] if result.reason else [])]
    if (result.line or result.message) and not _message_in_facts(result):
        parts.append(_remark_rich(_line_rich(result.line, result.quoted), result.message))
    if result.original:
        command = f"`meshcraft check {plain(chapter)} {plain(result.name)} --json`"
        parts.append(Prose(f"{ORIGINAL}: {command}", "dim", indent=2))
    rows, folded = _rows(result)
    if rows:
        parts.append(_facts_rich(rows))
    if folded:
        parts.append(Prose(_others(folded), "dim"))
    for fact in result.shown:
        if not fact.passed and (fact.message or fact.line):
            where = _line_rich(fact.line, result.quoted, (f"{_mark(fact)} ", "red"), (plain(fact.name), "bold"), "  ")
            parts += ["", _remark_rich(where, fact.message)]
    parts += [Prose(f"\n{line}", "dim") for line in _lines_below(result)]
    if result.denied:
        parts.append(Text(f"\n{DENIED}: {', '.join(map(plain, result.denied))}", style="dim"))
    return [*parts, ""]


def _rows(result: Result) -> tuple[tuple[Fact, ...], tuple[Fact, ...]]:
    """The facts in a table, those that failed first; and, if any failed, those that need no row of their own."""
    if all(fact.passed is not False for fact in result.shown):
        return result.shown, ()
    folded = tuple(fact for fact in result.shown if fact.passed or (fact.passed is None and not fact.interval))
    rows = (fact for fact in result.shown if fact not in folded)
    return tuple(sorted(rows, key=lambda fact: fact.passed is not False)), folded


def _others(facts: tuple[Fact, ...]) -> str:
    """Facts that pass, or were not measured, in one line below those that failed."""
    passed = sum(bool(fact.passed) for fact in facts)
    unmeasured = [plain(fact.name) for fact in facts if fact.passed is None]
    parts = [f"{count_of(passed, 'other fact')} {'passes' if passed == 1 else 'pass'}"] if passed else []
    parts += [f"{NOT_MEASURED}: {join_words(unmeasured)}"] if unmeasured else []
    return "; ".join(parts)


def _line_rich(line: str, quoted: Mapping[str, str], *before: str | tuple[str, str]) -> Text:
    where = [(f"{whose(line)} ", "dim"), (plain(line), "bold yellow")] if line else []
    if text := quoted.get(line):
        where.append((f"  {plain(text)}", "italic"))
    return Text.assemble(*before, *where)


def _remark_rich(where: Text, message: str) -> RenderableType:
    """The location and, indented below it at a readable width, the message."""
    pairs = (Constrain(where, WIDEST), where.plain), (Prose(message, indent=2), message)
    return Group(*(part for part, content in pairs if content))


def _facts_rich(facts: tuple[Fact, ...]) -> Table:
    columns = _columns(facts)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(" ", no_wrap=True)
    rows = [[_cell_rich(i, fact) for i in columns] for fact in facts]
    for at, i in enumerate(columns):
        longest = max(len(line) for row in rows for line in row[at].plain.splitlines() or [""])
        whole = longest <= 20 if i == 0 else i in NUMBERS and longest <= 13
        word = max((len(word) for row in rows for word in row[at].plain.split()), default=0)
        table.add_column(COLUMNS[i], overflow="fold", no_wrap=whole, min_width=word if word <= 20 else None)
    for fact, row in zip(facts, rows, strict=True):
        colour = {True: "green", False: "red" if fact.weight else "yellow", None: "dim"}[fact.passed]
        table.add_row(Text(_mark(fact), style=colour), *row)
    return table


def _cell_rich(column: int, fact: Fact) -> Text:
    if column == 0:
        name, unit = _name(fact)
        below = "\n" if len(name) + len(unit) > 18 else " "
        return Text.assemble(name, (f"{below}{unit}" if unit else "", "dim"))
    style = "bold" if column == 2 and fact.passed is False else ""
    return Text(_sizes(fact)[column] or _values(fact)[column], style=style)

"""A judgement for people: as HTML in notebooks and feedback pages, as a table in a terminal.

Everything that came from a student is escaped here. The HTML has inline styles only, no script and no address,
and takes its colours from what surrounds it, so that it reads on light and on dark.
"""

from __future__ import annotations

from html import escape

from rich.console import Group
from rich.table import Table
from rich.text import Text

from autograder.verdict import (
    FAIL,
    LIMIT_EXCEEDED,
    NEEDS_HUMAN,
    PARTIAL,
    PASS,
    REFUSED,
    STUDENT_ERROR,
    Fact,
    Report,
    Result,
)

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
RED = "#cf222e"
RICH = {PASS: "green", PARTIAL: "yellow", NEEDS_HUMAN: "magenta"}
COLUMNS = ("fact", "case", "measured", "limit", "reference", "naive", "unit")
DENIED = "refused by the sandbox and reported"
LONGEST = 4000

_CELL = "padding:3px 14px 3px 0;text-align:left;vertical-align:top;border:none;"
_RULE = "border-top:1px solid rgba(128,128,128,0.35);"
_FAINT = "opacity:0.7;"
_TEXT = "white-space:pre-wrap;overflow-wrap:anywhere;"
_MONO = "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:0.95em;"


def facts_html(judgement: Report | Result) -> str:
    """The judgement as a piece of HTML without script, style sheet or address."""
    results = judgement.functions if isinstance(judgement, Report) else (judgement,)
    parts = [_result_html(result) for result in results]
    if isinstance(judgement, Report):
        parts.append(_report_foot(judgement))
    style = "font-family:system-ui,sans-serif;font-size:13px;line-height:1.5;color:inherit;text-align:left;"
    return f'<div style="{style}">{"".join(parts)}</div>'


def facts_table(judgement: Report | Result) -> Group:
    """The judgement for a terminal; print it with rich."""
    results = judgement.functions if isinstance(judgement, Report) else (judgement,)
    parts = [part for result in results for part in _result_rich(result)]
    if isinstance(judgement, Report):
        parts += [Text(plain(note), style="dim") for note in judgement.notes]
        if len(results) > 1:
            parts.append(Text(f"{number(judgement.points)} of {number(judgement.max_points)} points", style="bold"))
    return Group(*parts)


def plain(text: object) -> str:
    """Text without control characters (no terminal escapes, no reversed writing), and not endless."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in str(text)[: LONGEST + 1])
    return shown if len(shown) <= LONGEST else shown[:LONGEST] + " …"


def number(value: float | str | None) -> str:
    """A measured value: short, and exact for whole numbers."""
    if value is None or isinstance(value, str):
        return plain(value or "")
    return f"{int(value):,}" if float(value).is_integer() else f"{value:.4g}"


def _values(fact: Fact) -> tuple[str, ...]:
    measured = "not measured" if fact.passed is None and fact.measured is None else number(fact.measured)
    rest = (number(value) for value in (fact.limit, fact.reference, fact.naive))
    return (plain(fact.name), plain(fact.case), measured, *rest, plain(fact.unit))


def _mark(fact: Fact) -> str:
    return "–" if fact.passed is None else "✓" if fact.passed else "✗"


def _columns(facts: tuple[Fact, ...]) -> list[int]:
    """The columns in which any fact has something to say; fact and measured always."""
    rows = [_values(fact) for fact in facts]
    return [i for i in range(len(COLUMNS)) if i in (0, 2) or any(row[i] for row in rows)]


def _where(line: str) -> str:
    return f"your line {plain(line)}" if line else ""


def _html(text: str) -> str:
    return escape(text, quote=True)


def _result_html(result: Result) -> str:
    colour = COLOURS.get(result.verdict, RED)
    badge = f"background:{colour};color:#fff;border-radius:10px;padding:1px 9px;font-size:12px;font-weight:600;"
    head = (
        f'<span style="{badge}">{_html(WORDS.get(result.verdict, plain(result.verdict)))}</span> '
        f'<b style="{_MONO}">{_html(plain(result.name))}</b> '
        f'<span style="{_FAINT}">{number(result.points)} of {number(result.max_points)} points</span>'
    )
    body = _remark(result.message, result.line, colour) + _facts_html(result.facts) + _denied_html(result.denied)
    return f'<div style="margin:10px 0 14px 0;"><div style="margin-bottom:4px;">{head}</div>{body}</div>'


def _remark(message: str, line: str, colour: str) -> str:
    if not message and not line:
        return ""
    where = f'<div style="{_FAINT}">{_html(_where(line))}</div>' if line else ""
    text = f'<div style="{_TEXT}{_MONO}">{_html(plain(message))}</div>' if message else ""
    return f'<div style="border-left:3px solid {colour};padding:2px 0 2px 10px;margin:4px 0 6px 0;">{where}{text}</div>'


def _facts_html(facts: tuple[Fact, ...]) -> str:
    if not facts:
        return ""
    columns = _columns(facts)
    heads = "".join(f'<th style="{_CELL}{_FAINT}font-weight:normal;">{COLUMNS[i]}</th>' for i in columns)
    rows = "".join(_fact_html(fact, columns) for fact in facts)
    table = "border-collapse:collapse;border:none;margin:0;font-size:13px;color:inherit;"
    head = f'<tr style="background:none;"><th style="{_CELL}"></th>{heads}</tr>'
    return f'<table style="{table}"><thead style="border:none;">{head}</thead><tbody>{rows}</tbody></table>'


def _fact_html(fact: Fact, columns: list[int]) -> str:
    colour = {True: "#2da44e", False: "#e5534b", None: "inherit"}[fact.passed]
    mark = f'<td style="{_CELL}{_RULE}color:{colour};font-weight:700;">{_mark(fact)}</td>'
    values = _values(fact)
    cells = "".join(f'<td style="{_CELL}{_RULE}{_bold(i, fact)}">{_html(values[i])}</td>' for i in columns)
    row = f'<tr style="background:none;">{mark}{cells}</tr>'
    if fact.passed or not (fact.message or fact.line):
        return row
    where = f'<span style="{_FAINT}">{_html(_where(fact.line))}</span>' if fact.line else ""
    gap = "<br>" if fact.line and fact.message else ""
    note = f'<td colspan="{len(columns)}" style="{_CELL}{_TEXT}">{where}{gap}{_html(plain(fact.message))}</td>'
    return f'{row}<tr style="background:none;"><td style="{_CELL}"></td>{note}</tr>'


def _bold(column: int, fact: Fact) -> str:
    return "font-weight:600;" if column == 2 and fact.passed is False else ""


def _denied_html(denied: tuple[str, ...]) -> str:
    if not denied:
        return ""
    items = ", ".join(_html(plain(call)) for call in denied)
    return (
        f'<div style="margin-top:4px;"><span style="{_FAINT}">refused by the sandbox and reported:</span> {items}</div>'
    )


def _report_foot(report: Report) -> str:
    lines = [plain(note) for note in report.notes]
    if report.isolation:
        lines.append(f"judged under isolation: {plain(report.isolation)}")
    return "".join(f'<div style="{_FAINT}">{_html(line)}</div>' for line in lines)


def _result_rich(result: Result) -> list[Text | Table]:
    colour = RICH.get(result.verdict, "red")
    head = Text.assemble(
        (WORDS.get(result.verdict, plain(result.verdict)), f"bold {colour}"),
        "  ",
        (plain(result.name), "bold"),
        (f"  {number(result.points)} of {number(result.max_points)} points", "dim"),
    )
    parts: list[Text | Table] = [head]
    if result.line:
        parts.append(Text(f"  {_where(result.line)}", style="dim"))
    if result.message:
        parts.append(Text(f"  {plain(result.message)}"))
    if result.facts:
        parts.append(_facts_rich(result.facts))
    if result.denied:
        parts.append(
            Text(f"  refused by the sandbox and reported: {', '.join(map(plain, result.denied))}", style="dim")
        )
    return [*parts, Text("")]


def _facts_rich(facts: tuple[Fact, ...]) -> Table:
    columns = _columns(facts)[1:]
    columns = [i for i in columns if COLUMNS[i] != "unit"]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(" ")
    table.add_column("fact", overflow="fold", min_width=12)
    for i in columns:
        table.add_column(COLUMNS[i], overflow="fold")
    for fact in facts:
        colour = {True: "green", False: "red", None: "dim"}[fact.passed]
        values = _values(fact)
        name = Text.assemble(values[0], (f" ({values[-1]})" if values[-1] else "", "dim"))
        table.add_row(Text(_mark(fact), style=colour), name, *(Text(values[i]) for i in columns))
    remarks = [fact for fact in facts if not fact.passed and (fact.message or fact.line)]
    if not remarks:
        return table
    whole = Table.grid(padding=(0, 0))
    whole.add_row(table)
    for fact in remarks:
        text = "\n".join(filter(None, [_where(fact.line), plain(fact.message)]))
        whole.add_row(Text.assemble((f"{plain(fact.name)} {plain(fact.case)}".strip(), "red"), "\n", text))
    return whole

"""A prediction's figures as tables: plain rows of text, and the same for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from course.mesh import mesh_text
from course.program.ir import plain_kind
from course.program.simulator.trace import shape_text
from course.render.captions import conclusion, line_text
from course.render.quantities import Figure, bytes_text, count_text, printable, seconds_text, share_text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table

    from course.prediction import Prediction

LONGEST, WIDEST = 10, 100


@dataclass(frozen=True)
class Section:
    """A table of text.

    Attributes:
        title: Heading.
        columns: Column headings; one that ends in ``>`` has numbers, aligned right.
        rows: One text per column.
        more: Number of rows left out.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    more: int = 0


def heading(prediction: Prediction) -> str:
    """``fsdp_loss on 8xH100, data=8``."""
    about = f"{prediction.timeline.machine}, {mesh_text(prediction.timeline.mesh)}"
    return f"{prediction.name} on {about}" if prediction.name else about


def comparison(predictions: Mapping[str, Prediction]) -> Section:
    """The figures of several predictions side by side; of a single one under an empty name."""
    figures_by_name = {name: prediction.figures() for name, prediction in predictions.items()}
    names = list(dict.fromkeys(name for figures in figures_by_name.values() for name in figures))
    # A figure that only some have is placed as in the first prediction that has it.
    rows = tuple((name, *(figures.get(name, "–") for figures in figures_by_name.values())) for name in names)
    return Section("", ("", *figures_by_name), rows)


def sections(prediction: Prediction) -> list[Section]:
    """Time by line, the critical path, and the transfers."""
    return [section for section in (_lines(prediction), _critical(prediction), _sent(prediction)) if section.rows]


def _lines(prediction: Prediction) -> Section:
    whole = prediction.timeline.seconds
    rows = [
        (
            line_text(entry.line),
            *_share(entry.compute, whole),
            seconds_text(entry.sending),
            count_text(entry.flops, "FLOP") if entry.flops else "",
            ", ".join(entry.kinds[:2]),
        )
        for entry in prediction.lines()
    ]
    columns = ("your line", "computing>", "of step>", "sending>", "FLOPs>", "operations")
    return _section("where time goes, by your lines (cell:line)", columns, rows)


def _critical(prediction: Prediction) -> Section:
    whole = prediction.timeline.seconds
    rows = [
        (line_text(piece.line), plain_kind(piece.kind), piece.stream, str(piece.count), *_share(piece.seconds, whole))
        for piece in prediction.timeline.critical
    ]
    columns = ("your line", "operation", "stream", "times>", "in all>", "of step>")
    return _section("critical path: what would have to be faster for the step to be", columns, rows)


def _sent(prediction: Prediction) -> Section:
    collectives = sorted(prediction.costs.collectives, key=lambda c: (-c.total_bytes, c.line, c.kind))
    rows = [
        (
            *(line_text(c.line), plain_kind(c.kind), ",".join(c.axes), shape_text(c.shape, c.dtype)),
            *(str(c.count), bytes_text(c.total_bytes)),
        )
        for c in collectives
    ]
    columns = ("your line", "collective", "over", "operand of a device", "times>", "sent in all>")
    return _section("what a device sends", columns, rows)


def _share(seconds: float, whole: float) -> tuple[str, str]:
    return seconds_text(seconds), share_text(seconds, whole)


def _section(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Section:
    return Section(title, columns, tuple(rows[:LONGEST]), max(0, len(rows) - LONGEST))


def prediction_tables(prediction: Prediction) -> list[RenderableType]:
    """Everything about one prediction; print it with rich."""
    head = rich_comparison(heading(prediction), {"": prediction}, prediction.remarks)
    return [*head, *rich_sections(prediction)]


def rich_comparison(
    title: str, predictions: Mapping[str, Prediction], remarks: Mapping[str, str]
) -> list[RenderableType]:
    """``comparison`` for a terminal, and the reasons why something is missing."""
    from rich.text import Text

    notes = [Text(printable(f"{name}: {why}"), style="dim") for name, why in remarks.items()]
    table = Fitting(comparison(predictions))
    first = next(iter(predictions.values()))
    return [Text(printable(title), style="bold"), table, Text(printable(conclusion(first.timeline))), *notes]


def rich_sections(prediction: Prediction) -> list[RenderableType]:
    """``sections`` for a terminal."""
    from rich.text import Text

    parts: list[RenderableType] = []
    for section in sections(prediction):
        parts += [Text("\n" + section.title, style="bold"), FittingLines(section)]
        if section.more:
            parts.append(Text(f"and {section.more} more", style="dim"))
    return parts


def _too_wide(table: Table, console: Console, options: ConsoleOptions) -> bool:
    return console.measure(table, options=options.update(max_width=10_000)).maximum > options.max_width


@dataclass(frozen=True)
class Fitting:
    """A table of figures for a terminal; if that is too narrow, shares are below their figures."""

    section: Section

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = rich_table(self.section)
        if _too_wide(table, console, options):
            rows = tuple(
                tuple(cell.stacked if isinstance(cell, Figure) else cell for cell in row) for row in self.section.rows
            )
            table = rich_table(replace(self.section, rows=rows))
            longest = max(len(row[0]) for row in rows)
            table.columns[0].no_wrap = 3 * longest <= options.max_width
        yield table


@dataclass(frozen=True)
class FittingLines:
    """A table whose rows begin with ``file:line``, in a terminal that may be too narrow for it: no name is broken."""

    section: Section

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = rich_table(self.section)
        if _too_wide(table, console, options):
            rows = [[cell.replace(", ", "\n") for cell in row] for row in self.section.rows]
            heads = [max(map(len, column.rstrip(">").split())) for column in self.section.columns]
            widths = [
                max(head, *(len(line) for cell in cells for line in cell.split("\n")))
                for head, cells in zip(heads, zip(*rows, strict=True), strict=True)
            ]
            room = options.max_width - sum(widths[1:]) - len(widths) + 1
            if widths[0] > room:
                rows = [[row[0].replace(":", "\n:"), *row[1:]] for row in rows]
            table = rich_table(replace(self.section, rows=tuple(map(tuple, rows))), gap=1)
            if room >= max(len(line) for row in rows for line in row[0].split("\n")):
                for column, width in zip(table.columns, [min(widths[0], room), *widths[1:]], strict=True):
                    column.width = width
        yield table


def rich_table(section: Section, gap: int = 2) -> Table:
    """The table for a terminal, with ``gap`` spaces between columns."""
    from rich.table import Table
    from rich.text import Text

    named = any(section.columns)  # otherwise it has no headings
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim", show_header=named)
    for column in section.columns:
        # In a narrow terminal the widest column shrinks first; nothing is ever cut off.
        side = "right" if column.endswith(">") else "left"
        table.add_column(printable(column.rstrip(">")), justify=side, overflow="fold")
    for row in section.rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def as_text(parts: Sequence[RenderableType]) -> str:
    """The text that a terminal would show, without colours."""
    from rich.console import Console

    # In a notebook rich would display the text at once, but only the string is wanted.
    console = Console(width=WIDEST, highlight=False, color_system=None, force_terminal=False, force_jupyter=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().split("\n"))

"""A prediction's figures as tables: plain rows of text, and the same for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from course.program.timeline.trace import mesh_text, plain_kind, shape_text
from course.show.quantities import bytes_text, count_text, seconds_text, share_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from course.predict import Prediction

LONGEST, WIDEST = 10, 100


@dataclass(frozen=True)
class Section:
    """A table of text.

    Attributes:
        title: Stands above it.
        columns: The heads; a name that ends in ``>`` is of numbers, written flush right.
        rows: One text a column.
        more: How many rows are left out.
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
    """The figures of several predictions side by side; of one alone under an empty name."""
    each = {name: prediction.figures() for name, prediction in predictions.items()}
    names = list(dict.fromkeys(name for figures in each.values() for name in figures))
    # What only some have stands where the first that has it put it.
    rows = tuple((name, *(figures.get(name, "–") for figures in each.values())) for name in names)
    return Section("", ("", *each), rows)


def sections(prediction: Prediction) -> list[Section]:
    """Where time goes by line, the critical path, and what is sent."""
    return [section for section in (_lines(prediction), _critical(prediction), _sent(prediction)) if section.rows]


def _lines(prediction: Prediction) -> Section:
    whole = prediction.timeline.seconds
    rows = [
        (entry.line or "unknown line", seconds_text(entry.compute), share_text(entry.compute, whole),
         seconds_text(entry.sending), count_text(entry.flops, "FLOP") if entry.flops else "",
         ", ".join(entry.kinds[:2]))
        for entry in prediction.lines()
    ]  # fmt: skip
    columns = ("line", "computing>", "of the step>", "sending>", "FLOPs>", "operations")
    return _section("where time goes, by line of the program", columns, rows)


def _critical(prediction: Prediction) -> Section:
    whole = prediction.timeline.seconds
    rows = [
        (piece.line or "unknown line", plain_kind(piece.kind), piece.stream, str(piece.count),
         seconds_text(piece.seconds), share_text(piece.seconds, whole))
        for piece in prediction.timeline.critical
    ]  # fmt: skip
    columns = ("line", "operation", "stream", "times>", "in all>", "of the step>")
    return _section("critical path: what would have to be faster for the step to be", columns, rows)


def _sent(prediction: Prediction) -> Section:
    found = sorted(prediction.costs.collectives, key=lambda c: (-c.total_bytes, c.line, c.kind))
    rows = [
        (c.line or "unknown line", plain_kind(c.kind), ",".join(c.axes), shape_text(c.shape, c.dtype), str(c.count),
         bytes_text(c.total_bytes))
        for c in found
    ]  # fmt: skip
    columns = ("line", "collective", "over", "operand of a device", "times>", "sent in all>")
    return _section("what a device sends", columns, rows)


def _section(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Section:
    return Section(title, columns, tuple(rows[:LONGEST]), max(0, len(rows) - LONGEST))


def prediction_tables(prediction: Prediction) -> list[RenderableType]:
    """Everything about one prediction; print it with rich."""
    head = rich_comparison(heading(prediction), {"": prediction}, prediction.remarks)
    return [*head, *rich_sections(prediction)]


def rich_comparison(
    title: str, predictions: Mapping[str, Prediction], remarks: Mapping[str, str]
) -> list[RenderableType]:
    """``comparison`` for a terminal, and why something is missing."""
    from rich.text import Text

    said = [Text(printable(f"{name}: {why}"), style="dim") for name, why in remarks.items()]
    return [Text(printable(title), style="bold"), rich_table(comparison(predictions)), *said]


def rich_sections(prediction: Prediction) -> list[RenderableType]:
    """``sections`` for a terminal."""
    from rich.text import Text

    parts: list[RenderableType] = []
    for section in sections(prediction):
        parts += [Text("\n" + section.title, style="bold"), rich_table(section)]
        if section.more:
            parts.append(Text(f"and {section.more} more", style="dim"))
    return parts


def rich_table(section: Section) -> RenderableType:
    """The table for a terminal."""
    from rich.table import Table
    from rich.text import Text

    named = any(section.columns)  # else it has no heads, and its texts may be long
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_header=named)
    for index, column in enumerate(section.columns):
        head, number = column.rstrip(">"), column.endswith(">")
        last = named and index == len(section.columns) - 1
        # Where it gets narrow the last column gives way, and a line's name that is very long.
        width = None if last or not named else 30
        side = "right" if number else "left"
        table.add_column(head, justify=side, no_wrap=named and not last, overflow="ellipsis", max_width=width)
    for row in section.rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def printable(said: str) -> str:
    """Without control characters: a line's name may come from a file that somebody sent."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in said)


def as_text(parts: Sequence[RenderableType]) -> str:
    """What a terminal would show, without colours."""
    from rich.console import Console

    # In a notebook rich would show the text at once, and it is only wanted as text.
    console = Console(width=WIDEST, highlight=False, color_system=None, force_terminal=False, force_jupyter=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().split("\n"))

"""Help of a command that fits a narrow terminal: a name and its value take one column, and nothing is cut off."""

from __future__ import annotations

from typing import Any

from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperArgument, TyperCommand

from autograder.commands.terminal import out


class Command(TyperCommand):
    """A command that shows its options in panels, in the order in which the panels first appear."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the usage, the paragraphs of the docstring and the panels."""
        console = out()
        with console.capture() as capture:
            console.print(Text(self.get_usage(ctx), style="bold"), end="\n\n")
            for paragraph in (self.help or "").split("\n\n"):
                console.print(Text(" ".join(paragraph.split())), end="\n\n")
            for title, rows in self._panels(ctx).items():
                table = Table.grid(padding=(0, 2))
                table.add_column(style="bold cyan", overflow="fold")
                table.add_column(overflow="fold", ratio=1)
                for names, meaning in rows:
                    table.add_row(Text(names.replace(" / ", "\n").replace(" range>", ">")), Text(meaning))
                console.print(Panel(table, title=title, title_align="left", border_style="dim"))
        formatter.write(capture.get())

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The names of options and arguments as manuals show them: those that are needed without braces."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def _panels(self, ctx: Any) -> dict[str, list[tuple[str, str]]]:
        """Names and meaning of each parameter, by the title of its panel."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                names, meaning = record
                if isinstance(parameter, TyperArgument):
                    names, title = names.partition(" <")[0], "Arguments"
                else:
                    title = getattr(parameter, "rich_help_panel", None) or "Options"
                panels.setdefault(title, []).append((names, meaning))
        return panels

"""MkDocs hook: the command reference, from the commands themselves."""

import re
from typing import Any

import typer.main

from autograder.cli import app


def _help(text: str | None) -> str:
    """Return help text as Markdown, with pipes and angle brackets escaped so that they make no table cells or HTML."""
    plain = re.sub(r"\[/?(?:bold|dim|italic)[^]]*\]", "", text or "")
    return plain.replace("|", "\\|").replace("<", "&lt;").strip()


def _default(parameter: Any) -> str:
    default = getattr(parameter.default, "value", parameter.default)
    if callable(default) or default in (None, "", False, True, ()) or not isinstance(default, str | int | float):
        return ""
    return f"`{default}`" if str(default).strip() else f"`{default!r}`"


def _rows(command: Any) -> list[str]:
    rows = []
    for parameter in command.params:
        names = [*parameter.opts, *parameter.secondary_opts]
        label = parameter.name.upper() if parameter.param_type_name == "argument" else "`, `".join(names)
        text = " ".join(_help(getattr(parameter, "help", "")).split())
        rows.append(f"| `{label}` | {text} | {_default(parameter)} |")
    return rows


def reference() -> str:
    """Every command, by panel: usage, what it does, and its arguments and options."""
    group: Any = typer.main.get_command(app)
    context, parts, panel = group.make_context("meshcraft", [], resilient_parsing=True), [], ""
    for name, command in group.commands.items():
        if (title := str(getattr(command, "rich_help_panel", ""))) != panel:
            panel = title
            parts.append(f"## {panel}")
        usage = command.collect_usage_pieces(context)
        parts += [f"### meshcraft {name}", f"```text\nmeshcraft {name} {' '.join(usage)}\n```", _help(command.help)]
        if rows := _rows(command):
            parts.append("\n".join(["| option | meaning | default |", "|---|---|---|", *rows]))
    return "\n\n".join(parts)


def on_page_markdown(markdown, page, **_):
    """Insert the reference into its page."""
    return markdown.replace("<!-- commands -->", reference()) if page.file.src_uri == "commands.md" else markdown

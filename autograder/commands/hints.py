"""Hints: one Markdown file per chapter, a heading per function, a numbered list of increasingly explicit hints."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from autograder.commands.terminal import UsageError, out
from autograder.progress import next_function, passing, recall, remember_hint
from course.curriculum import contract_folder

_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def read_hints(chapter: str) -> dict[str, list[str]]:
    """Each function's hints, from "where to look" to "almost the answer".

    Raises:
        UsageError: The chapter has none.
    """
    path = contract_folder(chapter) / "hints.md"
    if not path.exists():
        raise UsageError(f"the chapter {chapter} has no hints yet; its page has the theory")
    hints = {}
    for section in re.split(r"^## ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        name, _, body = section.partition("\n")
        tiers = re.split(r"^\d+\. ", body, flags=re.MULTILINE)[1:]
        hints[name.strip(" `")] = [_unindented(tier) for tier in tiers]
    return hints


def _unindented(tier: str) -> str:
    first, _, rest = tier.partition("\n")
    return f"{first}\n{textwrap.dedent(rest)}".strip()


def show_hint(path: Path, chapter: str, function: str | None, number: int | None = None, every: bool = False) -> None:
    """Show a function's next hint, the hint with this number, or all hints shown so far."""
    hints, known = read_hints(chapter), recall(path, chapter)
    passed = passing(path, chapter)
    name = function or next_function(hints, passed)
    if not name:
        from autograder.render import Prose

        text = f"all functions of {chapter} pass; `meshcraft hint {chapter} FUNCTION` still shows the hints of one"
        out().print(Prose(text), crop=False)
        return
    if name not in hints:
        raise UsageError(f"{chapter} has no hints for {name!r}, only for: {', '.join(hints)}")
    tiers, before = hints[name], known.hints.get(name, 0)
    if every and not before:
        raise UsageError(f"no hint for {name} has been shown yet; `meshcraft hint {chapter} {name}` shows the first")
    if number is not None and not 1 <= number <= min(before + 1, len(tiers)):
        raise UsageError(
            f"{name} has {len(tiers)} hints, and you have seen {before}; without a number you get the next"
        )
    last = number or min(before + 1, len(tiers))
    shown = range(1, before + 1) if every else [last]
    remember_hint(path, chapter, name, max(before, *shown))
    from rich.markdown import Markdown

    from autograder.render import WIDEST, Prose

    console = out()
    for tier in shown:
        console.print(f"[bold]{name}[/]  hint {tier} of {len(tiers)}")
        # Without colours, code keeps its backticks.
        text = tiers[tier - 1] if console.color_system else _CODE.sub(r"`` `\1` ``", tiers[tier - 1])
        console.print(Markdown(text), width=min(console.width, WIDEST))
    next_text = f"`meshcraft hint {chapter} {name}` again shows the next one."
    last_text = f"That was the last one. `meshcraft site {chapter}` opens the page with the theory behind it."
    console.print(Prose(last_text if shown[-1] == len(tiers) else next_text, "dim"), crop=False)

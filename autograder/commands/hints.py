"""Hints: one Markdown file per chapter, a heading per function, a numbered list of increasingly explicit hints."""

from __future__ import annotations

import re
import textwrap

from autograder.commands.terminal import UsageError
from course.curriculum import contract_folder


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

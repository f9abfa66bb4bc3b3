"""Parts of the site's pages that are generated, each between its two markers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def generated(page: Path, name: str) -> str:
    """The current content of a part of the page."""
    return _split(page.read_text(), name)[1].strip()


def write_parts(page: Path, made: Mapping[str, str]) -> None:
    """Write parts into the page, by name."""
    text = page.read_text()
    for name, part in made.items():
        before, _, after = _split(text, name)
        text = f"{before}\n{part}\n{after}"
    page.write_text(text)


def _split(text: str, name: str) -> tuple[str, str, str]:
    """The page before a part, that part, and the rest of the page."""
    start, end = f"<!-- {name}: generated -->\n", f"\n<!-- end of {name} -->"
    if start not in text or end not in text:
        raise ValueError(f"the page has no generated part {name!r}: write {start!r} and {end!r} around its place")
    before, after = text.index(start) + len(start), text.index(end)
    return text[:before], text[before:after], text[after:]

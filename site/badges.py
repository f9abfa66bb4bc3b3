"""MkDocs hook: each picture of a program says whether it is measured or predicted, and on which kind of machine."""

import re
from html import unescape

from course.machines import MACHINES

IDEAL = {m.name: not m.calibrated and (m.efficiency.matmul, m.efficiency.memory) == (1, 1) for m in MACHINES}
PREDICTED = re.compile(r"(?:Timeline of a step|A Program's ticks) on ([\w ().-]+?)[:,]")


def badge(title: str) -> str:
    """The badge of a picture by its title; empty for drawings that are neither measured nor predicted."""
    if "recorded on" in title:
        return "measured"
    if found := PREDICTED.match(title):
        return f"predicted, {'idealised' if IDEAL.get(found[1], True) else 'calibrated'}"
    return "predicted" if title.startswith("Memory of one device") else ""


def on_page_content(content, **_):
    """Put the badge in front of each caption."""

    def with_badge(found: re.Match[str]) -> str:
        title = re.search(r"<title[^>]*>(.*?)</title>", found[0], re.DOTALL)
        text = badge(unescape(title[1])) if title else ""
        mark = f'<figcaption><span class="badge">{text}</span> '
        return found[0].replace("<figcaption>", mark, 1) if text else found[0]

    return re.sub(r'<figure class="drawn">.*?</figure>', with_badge, content, flags=re.DOTALL)

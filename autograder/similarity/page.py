"""The report as one page without script or address: figures, and both sources side by side. Everything is escaped."""

from collections import Counter
from html import escape

from autograder.show import one_line, plain
from autograder.similarity.classes import Similar
from autograder.similarity.compare import Compared, Match
from autograder.similarity.sources import Written

EVIDENCE = (
    "This is evidence and no verdict: two people can honestly arrive at the same ten lines, and what the notebook or "
    "the page teaches, many write. Look at how rare a match is, read both sources, and speak with both people."
)
READING = (
    "Share: how much of the shorter source the other one has as well, whatever it calls things. Others: how many "
    "others have what the two share; where many do, it says nothing about these two. Public: how much of what they "
    "share is in public code, too. What the released notebook gives is left out."
)
MOST_PAIRS, MOST_LINES = 100, 400
RARE = 0.5
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.55 system-ui, sans-serif; max-width: 90rem; margin: 2rem auto; padding: 0 1.2rem; }
p { max-width: 60rem; } td, th { text-align: left; padding: .15rem 1.2rem .15rem 0; overflow-wrap: anywhere; }
.two { display: grid; grid-template-columns: 1fr 1fr; gap: 1rem; }
pre { font: .8rem/1.45 ui-monospace, Consolas, monospace; margin: 0; overflow-wrap: anywhere; white-space: pre-wrap; }
pre span { display: block; min-height: 1.45em; } .rare { background: rgba(207,34,46,.22); }
.common { background: rgba(128,128,128,.18); } summary { cursor: pointer; } .faint { opacity: .75; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(found: Similar) -> str:
    """The whole report; the strongest ``MOST_PAIRS`` matches with their sources."""
    every = [(compared, match) for compared in found.functions for match in compared.matches]
    every.sort(key=lambda pair: -pair[1].score)
    pairs = "".join(_pair(compared, match) for compared, match in every[:MOST_PAIRS])
    unread = "".join(f"<li>{_safe(author)}: {_safe(why)}</li>" for author, why in found.unread)
    more = f"<p>{len(every) - MOST_PAIRS} weaker matches are left out.</p>" if len(every) > MOST_PAIRS else ""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{escape(found.chapter)}: what looks alike</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(found.chapter)}: what looks alike</h1><p><strong>{EVIDENCE}</strong></p><p>{READING}</p>"
        f'<p>Marked lines are shared: <span class="rare">rare</span>, '
        f'<span class="common">common in this class</span>.</p>'
        f"{_usual(found)}{pairs or '<p>No two share anything rare.</p>'}{more}"
        f"{f'<h2>Not compared, or not in full</h2><ul>{unread}</ul>' if unread else ''}</body></html>\n"
    )


def said_of(match: Match) -> str:
    """The figures of a match in words."""
    program = {None: "not known", False: "different"}.get(
        match.program, f"the same, as {match.program_others} others' are"
    )
    others = f"{match.others:g} other{'' if match.others == 1 else 's'}"
    return f"share {match.share:.0%}, with {others} in the middle, {match.in_public:.0%} public, Programs {program}"


def _usual(found: Similar) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(each.function)}</code></td><td>{each.authors}</td>"
        f"<td>{'–' if each.usual is None else f'{each.usual:.0%}'}</td><td>{each.like_public}</td>"
        f"<td>{len(each.matches)}</td></tr>"
        for each in found.functions
    )
    columns = ("function", "authors", "two of the class usually share", "nearly as in public code", "rare matches")
    head = "".join(f"<th>{column}</th>" for column in columns)
    return f"<table><tr>{head}</tr>{rows}</table>"


def _pair(compared: Compared, match: Match) -> str:
    names = f"{_safe(match.first.author)} and {_safe(match.second.author)}"
    shared = match.first.grams.keys() & match.second.grams.keys()
    rare = {gram for gram in shared if compared.rarity(match, gram) >= RARE}
    sides = "".join(
        f"<div><strong>{_safe(w.author)}</strong><pre>{_listing(w, shared, rare)}</pre></div>"
        for w in (match.first, match.second)
    )
    return (
        f"<details><summary><code>{escape(match.function)}</code>: {names} "
        f'<span class="faint">{_safe(said_of(match))}</span></summary><div class="two">{sides}</div></details>'
    )


def _listing(written: Written, shared: set[int], rare: set[int]) -> str:
    """The lines; marked are those of whose fingerprints at least half are shared."""
    every, ours, unusual = (
        Counter(line for gram in grams for line in written.grams[gram]) for grams in (written.grams, shared, rare)
    )
    lines = written.text.split("\n")[:MOST_LINES]
    shown = []
    for number, line in enumerate(lines, 1):
        half = every[number] / 2 or 1
        mark = "rare" if unusual[number] >= half else "common" if ours[number] >= half else ""
        shown.append(f'<span class="{mark}">{escape(plain(line))}</span>')
    return "".join(shown)


def _safe(text: object) -> str:
    return escape(one_line(text), quote=True)

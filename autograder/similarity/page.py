"""The report as one page without scripts or URLs: figures, and both sources side by side. Everything is escaped."""

from collections import Counter
from pathlib import Path

from autograder.render import one_line, page_template, plain
from autograder.similarity.classes import Similar
from autograder.similarity.compare import Compared, Match
from autograder.similarity.sources import Written

EVIDENCE = (
    "This is evidence, not a verdict: two people can honestly arrive at the same ten lines, and many people write what "
    "the notebook or the page teaches. Look at how rare a match is, read both sources, and speak with both people."
)
MOST_PAIRS, MOST_LINES = 100, 400
RARE = 0.5


def page(similar: Similar) -> str:
    """The whole report; the strongest ``MOST_PAIRS`` matches with their sources."""
    matches = [(compared, match) for compared in similar.functions for match in compared.matches]
    matches.sort(key=lambda pair: -pair[1].score)
    template = page_template(Path(__file__).with_name("page.html.j2"), line=one_line, figures=match_summary)
    return template.render(
        chapter=similar.chapter,
        evidence=EVIDENCE,
        functions=similar.functions,
        pairs=[(match, _sides(compared, match)) for compared, match in matches[:MOST_PAIRS]],
        more=len(matches) - MOST_PAIRS,
        unread=similar.unread,
    )


def match_summary(match: Match) -> str:
    """The figures of a match in words."""
    others = f"{match.others:g} other{'' if match.others == 1 else 's'}"
    programs = match.program_text or "not known"
    return f"share {match.share:.0%}, with {others} (median), {match.in_public:.0%} public, Programs: {programs}"


def _sides(compared: Compared, match: Match) -> list[tuple[object, list[tuple[str, str]]]]:
    """Both authors, each with their lines."""
    shared = match.first.grams.keys() & match.second.grams.keys()
    rare = {gram for gram in shared if compared.rarity(match, gram) >= RARE}
    return [(written.author, _listing(written, shared, rare)) for written in (match.first, match.second)]


def _listing(written: Written, shared: set[int], rare: set[int]) -> list[tuple[str, str]]:
    """The lines with their marks: a line is marked if at least half of its fingerprints are shared."""
    total, ours, unusual = (
        Counter(line for gram in grams for line in written.grams[gram]) for grams in (written.grams, shared, rare)
    )
    shown = []
    for number, line in enumerate(written.text.split("\n")[:MOST_LINES], 1):
        half = total[number] / 2 or 1
        shown.append(("rare" if unusual[number] >= half else "common" if ours[number] >= half else "", plain(line)))
    return shown

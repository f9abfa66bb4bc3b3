"""One function on a feedback page: advice in words, then every figure, then the step.

Everything that came from a submission is escaped here, exception messages and line names alike.
"""

import re
import unicodedata
from collections.abc import Mapping
from functools import lru_cache
from html import escape

from autograder.contract.task import load, site_command
from autograder.contract.text import count_of
from autograder.contract.verdict import (
    FAIL,
    LIMIT_EXCEEDED,
    NEEDS_HUMAN,
    PARTIAL,
    PASS,
    REFUSED,
    STUDENT_ERROR,
    Fact,
    Kind,
    Result,
)
from autograder.render import COLOURS, GREY, NOT_STARTED, RED, WORDS, plain, table_html, whose
from course.curriculum import is_own
from course.program import ProgramError, Timeline
from course.render import side_by_side
from course.render.captions import HOW_TO_READ, compare_steps, conclusion
from course.render.timeline_summary import from_summary, pictured, to_summary

MEANING = {
    PASS: "Every fact is met.",
    PARTIAL: "The values are right. Some other facts are not met yet.",
    FAIL: "What it computes is not yet what it should be.",
    STUDENT_ERROR: "Your code stopped with an error before it returned a program that could be judged.",
    LIMIT_EXCEEDED: "It used more resources than a submission may use, and was ended.",
    REFUSED: "There is no program that could be judged.",
    NEEDS_HUMAN: "A person will grade this function: it has no grade until then, and that costs you no points.",
}
UNREADABLE = "It could not be judged, and has no grade until a person has looked at it:"
HIDDEN = "The inputs of official grading stay hidden. {} compares on inputs that you can see, and shows both values."
LINES = "{} shows the same step line by line, with its memory."
TRYING = (
    "The sandbox refused what your code tried here. Trying costs nothing: a function earns what its Programs do, "
    "whatever else was tried."
)
EARLIER = "{} uses {}, which is not right yet. Begin there: this function may be right, or nearly so, once that one is."
YOURS, REFERENCE = "yours", "the course's own"
_FILE = re.compile(r"(?:/[\w.+@\-]+){2,}/([\w.+\-]+)")


def function_html(chapter: str, result: Result, sources: Mapping[str, str], *, first: str = "", site: str = "") -> str:
    """A function's verdict as HTML without scripts; its only URLs are links to the course's own site.

    Args:
        chapter: The chapter's name.
        result: The result of official grading.
        sources: The student's lines by ``cell:line``, to quote those that a fact points to.
        first: An earlier function that this one uses, and that is not right yet.
        site: The address of the course's pages, if the instructor has given one.
    """
    colour = GREY if result.not_started else COLOURS.get(result.verdict, RED)
    word = NOT_STARTED if result.not_started else WORDS.get(result.verdict, result.verdict)
    parts = [
        f'<p><span class="badge" style="background:{colour}">{_safe(word)}</span> '
        f"{_safe(_meaning(result))} {_safe(result.reason)}</p>"
    ]
    if first and result.verdict not in (PASS, NEEDS_HUMAN):
        parts.append(f"<p>{EARLIER.format(_code(result.name), _code(first))}</p>")
    failed = [fact for fact in result.facts if fact.passed is False]
    skip_message = result.not_started or result.verdict == NEEDS_HUMAN or _message_in_facts(failed, result)
    if not skip_message and (result.message or result.line):
        parts.append(_finding("", result.message, result.line, sources))
    parts += [_finding(_title(fact), fact.message, fact.line, sources) for fact in failed]
    parts.append(_next(chapter, result, failed, site))
    parts.append(table_html(tuple(sorted(result.facts, key=_urgency)), notes=False))
    parts += [
        f"<p>{_safe(fact.name)}: {_safe(tidy(fact.message))}.</p>"
        for fact in result.facts
        if fact.passed is None and fact.message
    ]
    parts.append(_step(chapter, result))
    parts.append(_denied(result.denied))
    return "".join(parts)


def _meaning(result: Result) -> str:
    if result.unreadable:
        return f"{UNREADABLE} {_sentence(result.message)}"
    return "It is not written yet." if result.not_started else MEANING.get(result.verdict, "")


def _sentence(message: str, *, capital: bool = False) -> str:
    text = tidy(message).rstrip(".")
    return f"{text[:1].upper() if capital else text[:1]}{text[1:]}."


def anchor(line: str) -> str:
    """The anchor of a student's line on the page."""
    return f"line-{line}"


def tidy(message: str) -> str:
    """A message with folders stripped from paths of other files, and without our names for cells."""
    return _FILE.sub(r"\1", message.replace("meshcraft-cell:", ""))


def _safe(text: str) -> str:
    return escape(plain(text), quote=True)


def _code(text: str) -> str:
    return f"<code>{_safe(text)}</code>"


def _message_in_facts(failed: list[Fact], result: Result) -> bool:
    return any((fact.message, fact.line) == (result.message, result.line) for fact in failed)


def _title(fact: Fact) -> str:
    advice = "" if fact.weight else " (advice, costs no points)"
    return f"{fact.name}{advice}"


def _urgency(fact: Fact) -> int:
    return 0 if fact.passed is False and fact.weight else 1 if fact.passed is False else 2


def _finding(title: str, message: str, line: str, sources: Mapping[str, str]) -> str:
    """One finding: its title, its explanation, and the student's line."""
    head = f"<h3>{_safe(title)}</h3>" if title else ""
    text = f"<p>{_safe(tidy(message))}</p>" if message else ""
    return f'<div class="finding">{head}{text}{_line(line, sources)}</div>'


def _line(line: str, sources: Mapping[str, str]) -> str:
    if not line:
        return ""
    name = _safe(line)
    quoted = sources.get(line, "").strip()
    link = f'<a href="#{_safe(anchor(line))}">{name}</a>' if line in sources else f"<code>{name}</code>"
    return f"<p>{whose(line)} {link}{' ' + _code(quoted) if quoted else ''}</p>"


def _next(chapter: str, result: Result, failed: list[Fact], site: str) -> str:
    """Next steps: sections of the course to read, and commands."""
    if result.verdict in (PASS, NEEDS_HUMAN):
        return ""
    check, hint, profile = (_code(f"meshcraft {word} {chapter} {result.name}") for word in ("check", "hint", "profile"))
    judged = [fact for fact in failed if fact.kind != Kind.FORM]
    sentences = [
        f"Read {_place(site, page, heading)} on the course's page {_code(page)}: {_code(site_command(page, heading))}."
        for page, heading in load(chapter).places(result)
    ]
    sentences.append(f"{hint} gives one more hint each time.")
    if any(fact.kind.required for fact in judged):
        sentences.append(HIDDEN.format(check))
    elif judged:
        sentences.append(f"{check} judges what you change, on every mesh that is fixed.")
    else:
        sentences.append(f"{check} judges what you change, in seconds.")
    if result.timeline and any(fact.kind in (Kind.MEMORY, Kind.COMMUNICATION, Kind.TIME) for fact in judged):
        sentences.append(LINES.format(profile))
    return f"<p>What helps now:</p><ul>{''.join(f'<li>{sentence}</li>' for sentence in sentences)}</ul>"


def _place(site: str, page: str, heading: str) -> str:
    """A heading of the course's pages, as a link if there is an address; a course's own chapter has none."""
    text = _safe(f"“{heading}”")
    if not site or is_own(page):
        return text
    return f'<a href="{_safe(f"{site}/{page}.html#{_slug(heading)}")}" rel="noreferrer">{text}</a>'


def _slug(heading: str) -> str:
    """A heading's anchor on the site, as generated by Python-Markdown."""
    ascii_only = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip().lower())


def next_step(chapter: str, results: list[Result]) -> dict[str, str]:
    """The next step for a student: the first function that is not right yet, with the reason in a sentence."""
    judged = [result for result in results if result.verdict != NEEDS_HUMAN]
    first = next((result for result in judged if result.verdict != PASS), None)
    if first is None:
        done = "Every function passes." if judged and len(judged) == len(results) else ""
        unreadable = next((_sentence(each.message, capital=True) for each in results if each.unreadable), "")
        wait = unreadable or "A person will look at this submission; there is nothing for you to do yet."
        return {"sentence": done or wait}
    if not any(result.points for result in judged):
        return {
            "function": first.name,
            "sentence": "Nothing has earned points yet. Begin at the top, one function at a time, with",
            "more": "",
            "command": f"meshcraft start {chapter}",
        }
    cause = f"“{first.missed[0].name}” is not met yet." if first.missed else _meaning(first)
    rest = sum(result.verdict != PASS for result in judged) - 1
    return {
        "function": first.name,
        "sentence": "Continue with",
        "more": f"{tidy(cause)} After that, {count_of(rest, 'more function')}." if rest else tidy(cause),
        "command": f"meshcraft check {chapter} {first.name}",
    }


def _step(chapter: str, result: Result) -> str:
    """The step at the realistic size next to the course's own: a picture, and its summary in words."""
    own = _read(result.timeline)
    if own is None:
        return ""
    case = next((t.at_scale[0].name for t in load(chapter).tasks if t.name == result.name and t.at_scale), "")
    reference = reference_step(chapter, result.name)
    timelines = {YOURS: pictured(own)} | ({REFERENCE: pictured(reference)} if reference else {})
    picture = side_by_side(timelines, reference=REFERENCE).replace(' xmlns="http://www.w3.org/2000/svg"', "")
    comparison = (
        compare_steps(own, reference)
        if reference
        else f"On {own.machine} your step would take {1e3 * own.seconds:.4g} ms."
    )
    summary = conclusion(pictured(own))
    terms = "".join(f"<dt>{_safe(term)}</dt><dd>{_safe(meaning)}</dd>" for term, meaning in HOW_TO_READ)
    return (
        f"<h3>Your step, predicted for {_safe(own.machine)} at {_safe(case)}</h3><p>{_safe(comparison)}</p>"
        f'<div class="picture">{picture}</div><p>{_safe(f"In yours, {summary[0].lower()}{summary[1:]}")}</p>'
        f"<details><summary>How to read this</summary><dl>{terms}</dl></details>"
    )


def _read(summary: object) -> Timeline | None:
    """The timeline in a verdict's summary, if it has one that can be drawn."""
    try:
        result = from_summary(summary)
    except ValueError:
        return None
    return result if result.bars and result.seconds else None


@lru_cache(maxsize=64)
def reference_step(chapter: str, name: str) -> Timeline | None:
    """The course's own step, simulated now; None if this installation does not include it."""
    from autograder.learner.profile import predict_solution

    try:
        prediction, _ = predict_solution(chapter, name)
    except (LookupError, ProgramError):
        return None
    return from_summary(to_summary(prediction.timeline))


def _denied(denied: tuple[str, ...]) -> str:
    if not denied:
        return ""
    items = "".join(f"<li>{_code(call)}</li>" for call in denied)
    return f"<h3>Refused by the sandbox</h3><p>{TRYING}</p><ul>{items}</ul>"

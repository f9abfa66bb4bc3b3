"""The requirements of a notebook, sentence by sentence, and the facts that enforce them."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autograder.contract.task import load
from autograder.release.notebook import BEGIN, read_cells
from course.curriculum import home

# The rows of a table with one of these words in its header, or with an empty header, are requirements.
TABLES = re.compile(r"\b(?:budget|option)\b|^[\s|]+$")
# A sentence that contains one of these words, or starts with one of these verbs, is a requirement.
WORDS = "must|may not|at most|at least|exactly|never|equals?|do not|don't|allowed|stays?|any size|once|the same on"
VERBS = (
    "Add|Apply|Average|Begin|Call|Compute|Cut|Divide|Draw|Gather|Give|Keep|Leave|Make|Multiply|Put|Raise|Return|Run|"
    "Scale|Send|Skip|Split|Sum|Take|Treat|Update|Use|Write"
)
REQUIRES = re.compile(rf"\b(?:{WORDS})\b|^(?:(?:Otherwise|Then|So|Instead|Also|Again),? )?(?:{VERBS})\b", re.IGNORECASE)
SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`*(])")
# Docstring sections that describe outputs, not inputs.
SECTIONS = re.compile(r"^(Returns|Raises):\n((?:[ \t]+.*\n?|\n)+)", re.MULTILINE)


@dataclass(frozen=True)
class Specification:
    """The notebook's text about one function above its stub, and its docstring.

    Attributes:
        text: All of it, whitespace normalised.
        required: The table rows and sentences that require something.
    """

    text: str
    required: tuple[str, ...]


def promised(chapter: str) -> dict[str, dict[str, tuple[str, ...]]]:
    """The chapter's ``PROMISES``: for each function, the facts that enforce each quoted piece; empty if it has none.

    A quote without facts is an explanation, not a requirement.
    """
    return getattr(importlib.import_module(f"autograder.chapters.{chapter}"), "PROMISES", {})


def specifications(chapter: str, root: Path | None = None) -> dict[str, Specification]:
    """The specification of each function: the text since the previous function, and its docstring."""
    by_function, texts, imported = {}, [], False
    for cell in read_cells((root or home(chapter)) / "solutions" / f"{chapter}.py"):
        if cell.kind == "markdown":
            texts += [cell.source] if imported else []
        elif BEGIN in cell.source:
            (function,) = ast.parse(cell.source).body
            assert isinstance(function, ast.FunctionDef)
            by_function[function.name] = _specification("\n\n".join(texts), ast.get_docstring(function) or "")
            texts = []
        imported |= cell.kind == "code"
    return by_function


def _specification(text: str, docstring: str) -> Specification:
    required, blocks = [], re.split(r"\n\s*\n|\n(?=#|[-*] |\d+\. )", text)
    for block in blocks:
        lines = block.strip().splitlines()
        if lines and lines[0].startswith("|"):
            if TABLES.search(lines[0]):
                required += [_plain(line) for line in lines[2:]]
        elif lines and not lines[0].startswith(("#", "Useful:")):
            required += [sentence for sentence in SENTENCE_END.split(_plain(block)) if REQUIRES.search(sentence)]
    required += [_plain(body) for _, body in SECTIONS.findall(inspect.cleandoc(docstring) + "\n")]
    return Specification(_plain(f"{text}\n\n{docstring}"), tuple(required))


def _plain(text: str) -> str:
    """Strip emphasis, list markers, and differences of whitespace."""
    return " ".join(re.sub(r"^\s*(?:[-*]|\d+\.)\s+|\*\*", "", text, flags=re.MULTILINE).split())


def problems(chapter: str, root: Path | None = None) -> Iterator[str]:
    """Yield requirements that are not quoted, and quotes that do not occur."""
    promises, known = promised(chapter), {fact for fact in load(chapter).explained_in}
    texts = specifications(chapter, root)
    for name in sorted(set(promises) - set(texts)):
        yield f"PROMISES has {name}, and the notebook has no such function"
    for name, specification in texts.items():
        quotes = promises.get(name, {})
        for quote, facts in quotes.items():
            if _plain(quote) not in specification.text:
                yield f"{name}: the notebook does not say {quote!r}"
            for fact in sorted(set(facts) - known):
                yield f"{name}: {quote!r} is enforced by {fact!r}, which the contract's `explained_in` does not have"
        for sentence in specification.required:
            if not any(_plain(quote) in sentence or sentence in _plain(quote) for quote in quotes):
                yield f"{name}: no fact is named for {sentence!r}"

"""English in messages: counts, bytes and lists."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

LARGE, UNITS = 10**7, ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def append_sentence(message: str, more: str) -> str:
    """Append a sentence to the message, before the table or picture on its later lines."""
    text, *picture = message.split("\n")
    return "\n".join([f"{text} {more}".strip(), *picture])


def count_of(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun, in the plural unless it is 1: ``1 other``, ``2,048 others``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def points_text(points: float) -> str:
    """``1 point``, ``2.5 points``."""
    return f"{points:g} point{'s' * (points != 1)}"


def short(number: float) -> str:
    """Four digits of a number, or its whole part if people can still read it: ``0.125``, ``28,800``, ``1.3e+09``."""
    return f"{number:,.0f}" if 10**4 <= abs(number) < LARGE else f"{number:.4g}"


def binary_units(number: float) -> str:
    """A large number of bytes in the unit that people think in; "" for a small one."""
    if not LARGE <= number < math.inf:
        return ""
    power = min(int(math.log2(number)) // 10, len(UNITS) - 1)
    return f"{number / 1024**power:.4g} {UNITS[power]}"


def format_bytes(number: float) -> str:
    """Bytes with their unit, as in the table: ``2,880 bytes``, ``2.842 GiB``."""
    return binary_units(number) or count_of(round(number), "byte")


def six_digits(number: float) -> str:
    """A number with six digits; zero has no sign."""
    return f"{number + 0.0:.6g}"


def distinct_texts(write: Callable[[Any], str], *numbers: float) -> list[str]:
    """Format each number with ``write``, or with as many more digits as it takes to tell different ones apart."""
    writers = write, *(lambda number, digits=digits: f"{number + 0.0:.{digits}g}" for digits in (6, 9, 17))
    written = [list(map(each, numbers)) for each in writers]
    return next((texts for texts in written if len(set(texts)) == len(set(numbers))), written[0])


def distinct_bytes(*numbers: float) -> list[str]:
    """Format each number as ``format_bytes`` does, or all as whole bytes if different ones would read the same."""
    texts = list(map(format_bytes, numbers))
    return texts if len(set(texts)) == len(set(numbers)) else [count_of(round(number), "byte") for number in numbers]


def join_words(words: Iterable[str]) -> str:
    """``a, b and c``."""
    *before, last = words
    return f"{', '.join(before)} and {last}" if before else last

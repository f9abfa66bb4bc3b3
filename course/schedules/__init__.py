"""Pipeline schedules: the family of published schedules, with times and costs.

>>> from course.schedules import gpipe, measure, run
>>> round(measure(run(gpipe(4, 8))).bubble, 4)
0.2727
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from course.schedules.measures import Measured, activations_form, bubble_form, measure, messages_form, num_ticks
from course.schedules.orders import Action, Schedule, forwards, text_of, written
from course.schedules.single import gpipe, one_f_one_b, pipedream, zero_bubble
from course.schedules.timing import Costs, Message, Span, Timed, run

if TYPE_CHECKING:
    from course.schedules.looped import FAMILY, LOOPED, breadth_first, compare, family, interleaved

__all__ = [
    "FAMILY",
    "LOOPED",
    "Action",
    "Costs",
    "Measured",
    "Message",
    "Schedule",
    "Span",
    "Timed",
    "activations_form",
    "breadth_first",
    "bubble_form",
    "compare",
    "family",
    "forwards",
    "gpipe",
    "interleaved",
    "measure",
    "messages_form",
    "num_ticks",
    "one_f_one_b",
    "pipedream",
    "run",
    "text_of",
    "written",
    "zero_bubble",
]


def __getattr__(name: str) -> Any:
    """Import the names of ``looped`` lazily, because it is not available everywhere."""
    if name in __all__:
        return getattr(importlib.import_module("course.schedules.looped"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Pipeline schedules: the family that papers describe, its times and its costs.

>>> from course.schedules import gpipe, measure, run
>>> round(measure(run(gpipe(4, 8))).bubble, 4)
0.2727
"""

from course.schedules.family import (
    FAMILY,
    LOOPED,
    breadth_first,
    family,
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream,
    zero_bubble,
)
from course.schedules.measures import (
    Measured,
    activations_form,
    bubble_form,
    compare,
    measure,
    messages_form,
    num_ticks,
)
from course.schedules.orders import Action, Schedule, forwards, text_of, written
from course.schedules.timing import Costs, Message, Span, Timed, run

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

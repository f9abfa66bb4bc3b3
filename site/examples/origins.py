"""Where an example's texts, tables and pictures are from: each says so, and carries it on its page as a badge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

from course.machines import MACHINES

# "sourced" is a published figure, and "run on CPU devices" what a program printed or computed here.
Origin = Literal[
    "measured",
    "compiled",
    "predicted, idealised",
    "predicted, calibrated",
    "predicted",
    "counted in the program",
    "counted by closed form",
    "run on CPU devices",
    "sourced",
    "diagram",
]
Origins = tuple[Origin, ...]

EXAMPLES: dict[str, Callable[[], Any]] = {}
KEPT: dict[str, bool] = {}
ORIGINS: dict[str, tuple[Origins, dict[str, Origin | Origins]]] = {}


def example(*origins: Origin, **others: Origin | Origins) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Run this function whenever the site is built.

    Args:
        origins: Of all that it shows; none for a function that only quotes figures and draws timelines.
        others: Of single texts and pictures, by name.
    """
    given = [each for one in (origins, *others.values()) for each in ((one,) if isinstance(one, str) else one)]
    if unknown := set(given) - set(get_args(Origin)):
        raise ValueError(f"{', '.join(unknown)}: an origin is one of: {', '.join(get_args(Origin))}")

    def mark(function: Callable[[], Any]) -> Callable[[], Any]:
        EXAMPLES[function.__name__], ORIGINS[function.__name__] = function, (origins, others)
        return function

    return mark


def kept(
    *origins: Origin, slow: bool = False, **others: Origin | Origins
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Show what ``site/computed.py --keep CHAPTER`` recorded: it takes long (``slow``: minutes), or a GPU compiler."""

    def mark(function: Callable[[], Any]) -> Callable[[], Any]:
        KEPT[function.__name__] = slow
        return example(*origins, **others)(function)

    return mark


def origins_of(function: str, name: str) -> Origins:
    """Of a text or picture of an example.

    Raises:
        ValueError: The example does not say.
    """
    every, others = ORIGINS[function]
    found = others.get(name) or every
    if not found:
        raise ValueError(f"{function} shows {name}, which needs a badge, as in: @example({get_args(Origin)[0]!r})")
    return (found,) if isinstance(found, str) else found


def predicted_on(name: str) -> Origin:
    """The origin of what is predicted for a machine, or one made from it with a longer name."""
    where = max((one for one in MACHINES if name.startswith(one.name)), key=lambda one: len(one.name), default=None)
    if where is None:
        return "predicted, idealised"
    ideal = not where.calibrated and (where.efficiency.matmul, where.efficiency.memory) == (1, 1)
    return "predicted, idealised" if ideal else "predicted, calibrated"

"""The origins of an example's texts, tables and pictures: each declares its own, and its page shows it as a badge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

from course.machines import MACHINES

# "sourced" is a published figure, and "run on CPU devices" is what a program printed or computed here.
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
        origins: Origins of everything that it shows; none if it only quotes figures and draws timelines.
        others: Origins of individual texts and pictures, by name.
    """
    declared = [
        origin for group in (origins, *others.values()) for origin in ((group,) if isinstance(group, str) else group)
    ]
    if unknown := set(declared) - set(get_args(Origin)):
        raise ValueError(f"{', '.join(unknown)}: an origin is one of: {', '.join(get_args(Origin))}")

    def mark(function: Callable[[], Any]) -> Callable[[], Any]:
        EXAMPLES[function.__name__], ORIGINS[function.__name__] = function, (origins, others)
        return function

    return mark


def kept(
    *origins: Origin, slow: bool = False, **others: Origin | Origins
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Show what ``computed.py --keep CHAPTER`` recorded: it takes long (``slow``: minutes) or needs a GPU compiler."""

    def mark(function: Callable[[], Any]) -> Callable[[], Any]:
        KEPT[function.__name__] = slow
        return example(*origins, **others)(function)

    return mark


def origins_of(function: str, name: str) -> Origins:
    """The origins of a text or picture of an example.

    Raises:
        ValueError: The example does not declare any.
    """
    defaults, by_name = ORIGINS[function]
    origins = by_name.get(name) or defaults
    if not origins:
        raise ValueError(f"{function} shows {name}, which needs a badge, as in: @example({get_args(Origin)[0]!r})")
    return (origins,) if isinstance(origins, str) else origins


def predicted_on(name: str) -> Origin:
    """The origin of a prediction for a machine, or for one derived from it with a longer name."""
    where = max((m for m in MACHINES if name.startswith(m.name)), key=lambda m: len(m.name), default=None)
    if where is None:
        return "predicted, idealised"
    ideal = not where.calibrated and (where.efficiency.matmul, where.efficiency.memory) == (1, 1)
    return "predicted, idealised" if ideal else "predicted, calibrated"

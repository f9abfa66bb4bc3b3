"""A course's settings: its name, its exchange and its late penalty, in the course folder's course.toml."""

import json
import re
import tomllib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import msgspec

from course.files import write_atomically

FILE = "course.toml"
MOST_POINTS = 1000
LEAST_BUDGET = 10  # seconds; a single function may need this many
HEAD = """\
# Written by `meshcraft init`. Run it again to change something, or change it here; due dates are in the gradebook.
"""


class CourseError(Exception):
    """The course folder cannot be used; the message gives the cause and the remedy."""


@dataclass(frozen=True)
class Settings:
    """A course's settings.

    ``late_per_day`` and ``late_at_most`` are percent of the points earned; ``exchange`` is a folder, or empty. ``vary``
    says whether new chapters ask for variants, and ``variants`` gives the one of each ``chapter.function``.
    ``late_grace`` is in minutes. ``points`` has the points of each ``chapter.function`` that differ from the course's
    own; 0 means that it is not graded. ``dropped`` has the chapters that no longer count, ``group`` the Unix group of
    the assistants, and ``site`` the address of the course's pages for links in feedback. ``budget`` is the processor
    seconds that a submission may take before a person has to look at it; 0 for the usual limit.
    ``limits`` has factors on limits of facts, as ``chapter.function.fact``.
    """

    name: str = "course"
    exchange: str = ""
    late_per_day: float = 0.0
    late_at_most: float = 100.0
    late_grace: float = 0.0
    vary: bool = False
    variants: dict[str, str] = field(default_factory=dict)
    points: dict[str, float] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    group: str = ""
    site: str = ""
    budget: float = 0.0
    limits: dict[str, float] = field(default_factory=dict)


def read_settings(folder: Path) -> Settings:
    """The course's settings; the defaults if it has no file.

    Raises:
        CourseError: The file is invalid.
    """
    path = folder / FILE
    if not path.exists():
        return Settings()
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        known = [each.name for each in fields(Settings)]
        wrong = [name for name in table if name not in known]
        if wrong:
            raise ValueError(f"it has unknown settings: {', '.join(wrong)}; it may have {', '.join(known)}")
        return checked(msgspec.convert(table, Settings))
    except (ValueError, OSError) as error:
        raise CourseError(f"{path} cannot be used: {error}; correct it") from error


def chapters_of(course: Path) -> list[str]:
    """The chapters that the course hands out, dropped ones included; none in a folder that `init` has not made."""
    return [path.stem for path in sorted((course / "source").glob("*/*.ipynb")) if path.stem == path.parent.name]


def checked(settings: Settings) -> Settings:
    """Validate the settings and return them.

    Raises:
        ValueError: A setting is invalid; the message names it and the allowed values.
    """
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", settings.name):
        raise ValueError(f"the course is called {settings.name!r}; use letters, digits and any of _ . -")
    for name in ("late_per_day", "late_at_most"):
        if not 0 <= getattr(settings, name) <= 100:
            raise ValueError(f"{name} is {getattr(settings, name):g}; write a percentage from 0 to 100")
    if not 0 <= settings.late_grace <= 24 * 60:
        raise ValueError(f"late_grace is {settings.late_grace:g}; write minutes from 0 to {24 * 60}")
    for name, points in settings.points.items():
        if not 0 <= points <= MOST_POINTS:
            raise ValueError(f"{name} is worth {points:g} points; write 0, for not graded, to {MOST_POINTS}")
    if settings.budget and not LEAST_BUDGET <= settings.budget <= 24 * 60 * 60:
        raise ValueError(
            f"budget is {settings.budget:g}; write at least {LEAST_BUDGET} processor seconds for a submission, or 0 "
            "for the usual limit"
        )
    for name, factor in settings.limits.items():
        if len(name.split(".", 2)) != 3 or not 0.1 <= factor <= 10:
            raise ValueError(
                f"the limit {name!r} is {factor:g}; write CHAPTER.FUNCTION.FACT and 0.1 to 10 times the usual limit"
            )
    if settings.site and not re.fullmatch(r"https?://[^\s\"'<>]+", settings.site):
        raise ValueError(f"the site is {settings.site!r}; write its address, such as https://example.org/meshcraft")
    return settings


def write_settings(folder: Path, settings: Settings) -> None:
    """Write course.toml."""
    lines = [f"{name} = {_toml(value)}\n" for name, value in asdict(settings).items()]
    write_atomically(folder / FILE, HEAD + "".join(lines))


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_toml(name)} = {_toml(each)}' for name, each in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)

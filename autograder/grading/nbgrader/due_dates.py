"""Due dates of assignments, and the sentence on the penalty for lateness."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autograder.grading.nbgrader import course
from autograder.grading.nbgrader.settings import CourseError, Settings

NONE = "none"


def parse_due(text: str) -> datetime | None:
    """Parse a due date into UTC; ``none`` is None. Without a time zone, this machine's applies.

    Raises:
        CourseError: It is not a date with a time.
    """
    if text == NONE:
        return None
    try:
        if "T" not in text and " " not in text:
            raise ValueError("there is no time in it")
        return datetime.fromisoformat(text).astimezone(UTC)
    except ValueError as error:
        raise CourseError(
            f"the time {text!r} cannot be read: {error}; write 2026-12-01T18:00 or 2026-12-01T18:00+01:00 (a due date "
            "may also be none)"
        ) from None


def shown(due: datetime) -> str:
    """The date and time in this machine's time zone, and in UTC if that differs."""
    local = due.astimezone()
    utc = "" if local.utcoffset() == due.utcoffset() else f" ({due:%Y-%m-%d %H:%M} UTC)"
    return f"{local:%Y-%m-%d %H:%M %Z}{utc}"


def policy(settings: Settings) -> str:
    """The late penalty as a sentence; empty if there is none."""
    if not settings.late_per_day:
        return ""
    details = f", {settings.late_at_most:g}% at most" if settings.late_at_most < 100 else ""
    details += f"; up to {settings.late_grace:g} minutes late count as on time" if settings.late_grace else ""
    return f"each day begun after the due date takes off {settings.late_per_day:g}% of the points earned{details}"


def due_dates(folder: Path) -> dict[str, datetime | None]:
    """Each assignment's due date in UTC, as recorded in the gradebook."""
    if not (folder / "gradebook.db").exists():
        return {}
    with course.open_gradebook(folder) as gradebook:
        stored: dict[str, Any] = {str(each.name): each.duedate for each in gradebook.assignments}
    return {name: date and date.replace(tzinfo=UTC) for name, date in stored.items()}

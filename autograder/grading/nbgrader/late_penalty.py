"""Late submissions: the penalty, as an nbgrader plugin, recomputed when a score has changed."""

import math
from pathlib import Path
from typing import Any

from nbgrader.plugins import BasePlugin
from nbgrader.preprocessors import AssignLatePenalties
from traitlets import Float
from traitlets.config import Config

from autograder.contract.text import count_of
from autograder.grading.nbgrader.bridge import configuration
from autograder.grading.nbgrader.course import has_gradebook, open_gradebook

MINUTE, HOUR, DAY = 60, 60 * 60, 24 * 60 * 60


class LatePenalty(BasePlugin):
    """A share of the points earned for each day begun after the due date, up to a limit."""

    per_day = Float(0.0, help="Percent of the points earned that each day begun takes off.").tag(config=True)
    grace = Float(0.0, help="Minutes after the due date that count as on time.").tag(config=True)
    at_most = Float(100.0, help="The largest percentage of the points earned to take off.").tag(config=True)

    def late_submission_penalty(self, student_id: str, score: float, total_seconds_late: float) -> float | None:
        """The points to deduct from ``score``; None if none. nbgrader calls this."""
        if total_seconds_late <= MINUTE * self.grace:
            return None
        percent = min(days_begun(total_seconds_late) * self.per_day, self.at_most)
        return score * percent / 100 or None

    def reason(self, seconds: float) -> str:
        """Describe in a sentence the rule applied to a submission that came this much after its due date."""
        late = f"handed in {duration(seconds)} after the due date"
        if seconds <= MINUTE * self.grace:
            return f"{late}: {self.grace:g} minutes count as on time"
        if not self.per_day:
            return late
        cap = f", at most {self.at_most:g}%" if self.at_most < 100 else ""
        return f"{late}: {count_of(days_begun(seconds), 'day')} begun, {self.per_day:g}% of the points each{cap}"


def days_begun(seconds: float) -> int:
    """A delay in days, rounded up."""
    return math.ceil(seconds / DAY)


def duration(seconds: float) -> str:
    """A delay in words, in the largest unit of which it has at least two."""
    unit, size = next(((n, s) for n, s in (("day", DAY), ("hour", HOUR)) if seconds >= 2 * s), ("minute", MINUTE))
    return count_of(max(1, math.floor(seconds / size)), unit)


def renew_penalties(course: Path, assignment: str) -> None:
    """Recompute every penalty, so that manual scores, extensions and new due dates count.

    nbgrader itself computes a penalty once, when the notebook is graded, before a person has given points.

    Raises:
        CourseError: The gradebook cannot be used.
    """
    if not has_gradebook(course):
        return
    plugin = late_plugin(configuration(course, assignment))
    with open_gradebook(course) as gradebook:
        for submission in gradebook.assignment_submissions(assignment):
            set_penalties(plugin, submission)
        gradebook.db.commit()


def late_plugin(config: Config) -> Any:
    """The configured plugin: ours, or one of nbgrader's."""
    step = AssignLatePenalties(config=config)
    step.init_plugin()
    return step.plugin_inst


def set_penalties(plugin: Any, submission: Any) -> None:
    """Set the penalty of each notebook of a submission; the caller commits."""
    late = submission.total_seconds_late
    for notebook in submission.notebooks:
        score = notebook.score
        penalty = plugin.late_submission_penalty(str(submission.student.id), score, late) if late else None
        notebook.late_submission_penalty = penalty and min(max(penalty, 0.0), score)

"""The `meshcraft` command."""

from __future__ import annotations

import io
import sys
from functools import partial

import typer

from autograder.commands import (
    chapters,
    course,
    grade,
    init,
    instructor,
    learner,
    lenses,
    new_chapter,
    people,
    plan,
    predict,
    report,
    similar,
    site,
    train,
    watching,
)
from autograder.commands.help_text import Command
from autograder.commands.terminal import explained

app = typer.Typer(
    help="Learn to train neural networks across many devices, judged on what your program does.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

add = partial(app.command, cls=Command)
LEARN, TEACH = "For learners", "For instructors"
add("list", rich_help_panel=LEARN)(learner.chapters)
for command in (learner.start, learner.check, watching.watch, learner.hint, learner.reset, predict.profile, site.site):
    add(rich_help_panel=LEARN)(command)
for command in (
    init.init,
    instructor.build,
    grade.grade,
    course.status,
    course.feedback,
    course.export,
    report.report,
    people.collect,
    people.collect_git,
    people.extend,
    people.readers,
    people.request,
    people.requests,
    people.changes,
    similar.similar,
):
    add(rich_help_panel=TEACH)(command)
for command in (train.train, plan.plan, predict.predict, lenses.machines, lenses.memory, instructor.doctor):
    add(rich_help_panel="For anyone")(command)


for command in (new_chapter.new_chapter, chapters.check_course):
    add(rich_help_panel="For authors")(command)


def main() -> None:
    """Run the command; report expected errors as one sentence, without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name may contain characters that the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    with explained():
        app(prog_name="meshcraft")


if __name__ == "__main__":
    main()

"""A course's own limits: factors on the limits of facts, stated in the released notebook and passed to ``check``.

Official grading uses the settings and never the submission.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from autograder.contract.task import load
from autograder.contract.text import join_words
from autograder.grading.inside.intake import Cell, read_notebook
from autograder.grading.nbgrader.points import number_given, the_one
from autograder.grading.nbgrader.settings import CourseError, Settings, read_settings
from autograder.grading.outside.notebook_options import requested_limits

Factors = dict[str, dict[str, float]]


def limits_in(settings: Settings, chapter: str) -> Factors:
    """A chapter's part of the settings' limits, by function and fact."""
    limits: Factors = {}
    for name, factor in sorted(settings.limits.items()):
        where, function, fact = name.split(".", 2)
        if where == chapter:
            limits.setdefault(function, {})[fact] = factor
    return limits


def parse_limits(given: list[str], chapters: list[str]) -> dict[str, float]:
    """Parse ``fsdp_loss.live temporaries=1.5``, or with the chapter first, into factors by ``chapter.function.fact``.

    Raises:
        CourseError: It is not of that form, or no chapter of the course has such a function.
    """
    known = {f"{chapter}.{task.name}" for chapter in chapters for task in load(chapter).tasks}
    factors: dict[str, float] = {}
    for text in given:
        name = text.partition("=")[0]
        function, _, fact = name.rpartition(".")
        if not function:
            raise CourseError(f"--limit {text!r} is not FUNCTION.FACT=X, such as 'fsdp_loss.live temporaries=1.5'")
        full_name = the_one(function, known, "limits are given as fsdp_loss.live temporaries=1.5")
        factors[f"{full_name}.{fact}"] = number_given("--limit", text, "1.5")
    return factors


def require_possible(chapter: str, limits: Mapping[str, Mapping[str, float]]) -> None:
    """Require that every limit belongs to a fact, and that the course's own solution meets it.

    Raises:
        CourseError: A function has no such fact, or the solution falls short; the message lists the facts.
    """
    if not limits:
        return
    from autograder.check import check_solution  # which loads every analysis

    try:
        report = check_solution(chapter, [*limits], stretched=False, limits=limits)
    except LookupError as error:
        raise CourseError(f"the limits of {chapter} cannot be used: {error.args[0]}") from None
    for result in report.functions:
        if missed := [fact for fact in result.missed if fact.name in limits[result.name]]:
            raise CourseError(
                f"the course's own {result.name} would not meet {join_words(f'“{fact.name}”' for fact in missed)}: "
                f"{missed[0].measured_text} measured, {missed[0].limit_text} allowed; choose a larger factor"
            )


def require_stated(course: Path, chapter: str) -> Factors:
    """The course's limits, which the released notebook must state.

    Raises:
        CourseError: It states others.
    """
    settings = read_settings(course)
    released = course / "release" / chapter / f"{chapter}.ipynb"
    if released.is_file():
        require_same(read_notebook(released).cells, chapter, settings, str(released))
    return limits_in(settings, chapter)


def require_same(cells: Iterable[Cell], chapter: str, settings: Settings, where: str) -> None:
    """Require that a notebook's check cells state the course's limits.

    Raises:
        CourseError: They state others.
    """
    limits, stated = limits_in(settings, chapter), requested_limits(cells)
    if stated != limits:
        raise CourseError(
            f"{where} states the limits {stated or 'of the chapter'} and course.toml {limits or 'none'}; students "
            "are judged on what they were told: `meshcraft init .` in the course folder makes them agree, or "
            "restore course.toml"
        )

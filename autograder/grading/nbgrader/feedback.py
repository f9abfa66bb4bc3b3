"""Feedback pages: nbgrader's generate_feedback with our own page, which opens anywhere and loads no resources."""

import ast
import multiprocessing
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from html import escape
from pathlib import Path
from typing import Any

import bleach
from markupsafe import Markup
from nbconvert.exporters import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode
from nbgrader import utils
from nbgrader.api import Gradebook
from nbgrader.converters import GenerateFeedback
from nbgrader.preprocessors import GetGrades, NbGraderPreprocessor
from traitlets.config import Config

from autograder.contract.verdict import PASS, Result
from autograder.grading.nbgrader import register
from autograder.grading.nbgrader.bridge import configuration
from autograder.grading.nbgrader.course import open_ledger
from autograder.grading.nbgrader.group import share
from autograder.grading.nbgrader.late_penalty import LatePenalty, duration, late_plugin
from autograder.grading.nbgrader.names import name_problem
from autograder.grading.nbgrader.page import anchor, function_html, next_step
from autograder.grading.nbgrader.settings import read_settings
from autograder.release.converters import CHECK, run_nbgrader
from autograder.render import one_line, plain

TURNING = re.compile("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]")
VERBATIM = re.compile(r"(^```.*?^```|(?<!`)`[^`\n]+`(?!`)|\$\$.+?\$\$|\$[^$\n]+\$)", re.DOTALL | re.MULTILINE)
# An asterisk between the factors of a product, a doubled underscore around a name, a backslash of a formula.
FORMULA = re.compile(r"(?<=[\w)\]}])\*+(?=[\w(\[{\\])|(?<!\w)__(?=\w+__)|(?<=\w)__(?!\w)|\\(?=\W)")
KEPT = {ord(character): 0xE000 + ord(character) for character in "*_\\"}  # private use: no Markdown, no meaning
TYPED = {private: character for character, private in KEPT.items()}
MANY = 8  # from this many pages on, starting more processes pays off
PROSE = set("p br hr em strong del code pre blockquote ul ol li h1 h2 h3 h4 table thead tbody tr th td sub sup".split())


def write_feedback(
    course: Path, assignment: str, on_progress: Callable[[str], None] = lambda student: None, *, workers: int = 1
) -> tuple[list[Path], dict[str, str]]:
    """Write ``feedback/<student>/<assignment>/<assignment>.html`` for everyone whose verdict is in the gradebook.

    Args:
        course: The course folder.
        assignment: The chapter.
        on_progress: Progress callback, called with each student when done.
        workers: Processes that write pages, if there are many.

    Returns:
        The pages, and for each student without one, the reason.
    """
    course = course.resolve()
    with open_ledger(course) as ledger:
        entries = ledger.status(assignment)
    pages, problems = [], {}
    due = [entry.student for entry in entries if entry.booked]
    with _mapping(workers if len(due) >= MANY else 1) as map_pages:
        outcomes = map_pages(_try_page, [(course, assignment, student) for student in due])
        for student, (page, problem) in zip(due, outcomes, strict=True):
            if page is None:
                problems[student] = problem
            else:
                pages.append(page)
            on_progress(student)
    for entry in entries:
        if entry.booked:
            continue
        if name_problem(entry.student):
            problems[entry.student] = "the folder cannot be a student's; `meshcraft status` shows why"
        else:
            problems[entry.student] = f"no verdict in the gradebook yet; run `meshcraft grade {assignment}`"
        on_progress(entry.student)
    share(course)
    return pages, problems


@contextmanager
def _mapping(workers: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """``map``, in this process or over several."""
    if workers == 1:
        yield map
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        yield pool.map


def _try_page(arguments: tuple[Path, str, str]) -> tuple[Path | None, str]:
    try:
        return _write_page(*arguments), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _write_page(course: Path, assignment: str, student: str) -> Path:
    config = configuration(course, assignment, student)
    config.GenerateFeedback.force = True
    config.GenerateFeedback.exporter_class = FeedbackExporter
    config.GenerateFeedback.preprocessors = [GetGrades, Waiting]
    run_nbgrader(GenerateFeedback, config)
    return course / "feedback" / student / assignment / f"{assignment}.html"


class FeedbackExporter(HTMLExporter):
    """Writes our page. A separate class, because formgrader shows submissions with HTMLExporter's configuration."""

    @property
    def default_config(self) -> Config:
        config = Config(super().default_config)
        config.FeedbackExporter.template_name = "meshcraft"
        config.FeedbackExporter.extra_template_basedirs = [str(Path(__file__).parent / "templates")]
        config.FeedbackExporter.filters = {"judged": judged, "listing": listing, "plain": one_line, "prose": prose}
        return config


class Waiting(NbGraderPreprocessor):
    """Mark the cells without a grade, for which nbgrader's own score reads 0, and those graded manually."""

    def preprocess(self, nb: NotebookNode, resources: Any) -> tuple[NotebookNode, Any]:
        names = resources["nbgrader"]
        where = (names["notebook"], names["assignment"], names["student"])
        about = nb.metadata.setdefault("meshcraft", {})
        with Gradebook(names["db_url"]) as gradebook:
            about["late"] = self._late(gradebook.find_submission(names["assignment"], names["student"]))
            for cell in filter(utils.is_grade, nb.cells):
                grade = gradebook.find_grade(cell.metadata.nbgrader.grade_id, *where)
                roles = cell.metadata.nbgrader
                roles["waits"] = grade.auto_score is None and grade.manual_score is None
                roles["by_person"] = grade.manual_score is not None
                roles["auto"], roles["extra"] = grade.auto_score, grade.extra_credit or 0.0
        root = Path(str(self.config.CourseDirectory.root))
        about["site"] = read_settings(root).site
        about["request"] = register.values(root, register.REQUEST).get(f"{names['assignment']}/{names['student']}")
        results = [Result.from_json(_fields(each)) for each in about.get("functions", []) if "facts" in each]
        about["next"] = next_step(names["assignment"], results)
        return nb, resources

    def _late(self, submission: Any) -> str:
        """Describe in a sentence how late it was and what that costs; empty if it was on time."""
        seconds, plugin = submission.total_seconds_late, late_plugin(self.config)
        if not seconds:
            return ""
        rule = plugin.reason(seconds) if isinstance(plugin, LatePenalty) else f"{duration(seconds)} after the due date"
        hours = submission.extension.total_seconds() / 3600 if submission.extension else 0
        return f"{rule}; your extension of {hours:g} hours is included" if hours else rule


def judged(cell: NotebookNode, notebook: NotebookNode, chapter: str) -> Markup:
    """A check cell's verdict as HTML; a template filter. An older verdict is shown as it was booked."""
    name = cell.metadata.nbgrader.grade_id.removeprefix(CHECK)
    summaries = notebook.metadata.get("meshcraft", {}).get("functions", [])
    summary = next((function for function in summaries if function["name"] == name), {})
    if "facts" not in summary:
        return Markup("".join(output.data["text/html"] for output in cell.outputs))
    result = Result.from_json(_fields(summary))
    sources = {
        f"{_cell_name(c)}:{number}": line
        for c in notebook.cells
        if c.cell_type == "code"
        for number, line in enumerate(c.source.split("\n"), 1)
    }
    wrong = [function["name"] for function in summaries[: summaries.index(summary)] if function["verdict"] != PASS]
    first = first_used(result.name, wrong, "\n".join(c.source for c in notebook.cells if c.cell_type == "code"))
    site = notebook.metadata.get("meshcraft", {}).get("site", "")
    return Markup(function_html(chapter, result, sources, first=first, site=site))


def _fields(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: summary[field.name] for field in fields(Result) if field.name in summary}


def first_used(name: str, others: Collection[str], source: str) -> str:
    """The first of the other functions that a function uses, directly or through helpers; empty if it uses none.

    A notebook that is not Python as a whole is read definition by definition.
    """
    uses: dict[str, set[str]] = {}
    for part in re.split(r"^(?=def |class |@|%|!)", source, flags=re.MULTILINE):
        try:
            body = ast.parse(part).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        for node in body:
            if isinstance(node, ast.FunctionDef):
                uses[node.name] = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    reached, waiting = set(), [name]
    while waiting:
        for used in uses.get(waiting.pop(), ()):
            if used not in reached:
                reached.add(used)
                waiting.append(used)
    return next((other for other in others if other in reached), "")


def listing(cell: NotebookNode, verdicts: Mapping[str, Any]) -> Markup:
    """The cell's source with numbered lines, marking those that a verdict points to; a template filter."""
    pointed = {line for function in verdicts.get("functions", []) for line in function["lines"]}
    lines = []
    for number, line in enumerate(cell.source.split("\n"), 1):
        name = f"{_cell_name(cell)}:{number}"
        mark = f'<a id="{escape(anchor(name))}"></a>' if name in pointed else ""
        lines.append(f"<span{_marked(name in pointed)}>{mark}{escape(plain(line))}</span>")
    return Markup(f'<pre class="listing">{"".join(lines)}</pre>')


def _cell_name(cell: NotebookNode) -> str:
    return cell.metadata.get("meshcraft", {}).get("name", "")


def prose(text: str) -> Markup:
    """Render a person's Markdown as HTML without links, images or attributes; a template filter.

    Formulas stay as they were typed: ``L*W``, ``n<m`` and ``__init__`` keep their characters. Control characters and
    bidirectional overrides are removed.
    """
    renderer = IPythonRenderer(escape=True, exclude_anchor_links=True)
    html = MarkdownWithMath(renderer=renderer).render(_as_typed(TURNING.sub("", text))).translate(TYPED)
    return Markup(bleach.clean(html, tags=PROSE, attributes={}, strip=True))


def _as_typed(text: str) -> str:
    """Replace what Markdown would remove from a formula, using ``KEPT``, outside of code and dollar signs."""
    parts = VERBATIM.split(text)
    return "".join(
        part if n % 2 else FORMULA.sub(lambda match: match[0].translate(KEPT), part) for n, part in enumerate(parts)
    )


def _marked(yes: bool) -> str:
    return ' class="marked"' if yes else ""

"""Feedback pages: figures in words, the step next to the course's own, nothing hidden and no scripts."""

import json
import os
import re
from functools import cache
from html.parser import HTMLParser

import nbformat
import numpy as np
import pytest

from autograder.chapters.fsdp import CONTRACT
from autograder.chapters.fsdp.mutants import MUTANTS
from autograder.checking.follow_up import further_reading
from autograder.checking.judging import executor
from autograder.contract import verdict as verdicts
from autograder.contract.task import ABOUT_VERDICTS, load, references
from autograder.contract.verdict import FAIL, NEEDS_HUMAN, PARTIAL, PASS, STUDENT_ERROR, Fact, Kind, Result, Unit
from autograder.grading.inside.tracing import Traced, trace_cases
from autograder.grading.nbgrader import feedback
from autograder.grading.nbgrader.conftest import WHERE, booked, cell, file_and_book, hand_in, report
from autograder.grading.nbgrader.course import open_gradebook
from autograder.grading.nbgrader.page import MEANING, function_html, next_step, reference_step, tidy
from autograder.grading.outside.judge import _picture, expected, judge, plan
from course.curriculum import CHAPTERS, ROOT
from course.render.timeline_summary import to_summary

WRONG = {mutant.name: mutant for mutant in MUTANTS}
HIDDEN = ["sums_gradients", "averages_the_loss", "counts_devices_backwards"]
HIDDEN += ["gathers_in_bfloat16"] if os.environ.get("MESHCRAFT_FULL") else []
HOSTILE = '</pre></style><script>alert(1)</script><img src="http://evil.example/x.png" onerror=x>\x1b[31m\u202e&'
VOID = {"meta", "br", "hr", "img", "link"}


class Page(HTMLParser):
    """Parse a page and require every tag to be closed properly."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.ids, self.addresses, self.texts, self.meta = [], [], [], [], [], {}
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "meta":
            fields = dict(attrs)
            self.meta[fields.get("http-equiv") or fields.get("name")] = fields.get("content", "")
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), f"{tag} has {name}"
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "action", "background", "data", "srcset", "poster"):
                self.addresses.append(value)
            assert "://" not in (value or "") and "@import" not in (value or "")
            assert all(address.startswith("#") for address in re.findall(r"url\(([^)]*)\)", value or ""))

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def asks_for_nothing(page):
    assert not {"script", "img", "link", "iframe", "object", "embed", "form", "base", "video"} & {*page.tags}
    assert all(address.startswith("#") for address in page.addresses)


@cache
def mutant(name):
    """Official grading's result for a mutant, and every secret number."""
    return official(WRONG[name].task, WRONG[name].function)


def official(name, function, *, secret=b"s" * 32):
    task, own = CONTRACT.task(name), function.__code__.co_filename
    planned = plan("fsdp", task, secret=secret, submission="abc")
    traced = trace_cases(task, function, planned.traced, lambda file: "mine" if file == own else None)
    assert isinstance(traced, Traced), traced
    programs = {case: program.serialise() for case, program in traced.programs.items()}
    result = judge(planned, programs, traced.line, executor().ask)
    hidden = [
        np.abs(array.astype(np.float64)).ravel()
        for case in planned.cases
        for arrays in expected(planned, case)
        for array in arrays.values()
        if array.dtype.kind == "f"
    ]
    return result, np.unique(np.concatenate(hidden))


def leaked(text, hidden):
    """Numbers of five or more digits in a text that equal a hidden number as it would be printed."""
    leaks = []
    for shown in re.findall(r"\d*\.\d+(?:e[+-]\d+)?", text):
        digits = re.sub(r"e.*", "", shown).replace(".", "").lstrip("0")
        if len(digits) >= 5:
            value = float(shown)
            at = np.searchsorted(hidden, value)
            nearest = min(abs(hidden[max(0, at - 1) : at + 1] - value), default=1.0)
            if nearest <= 0.5 * 10.0 ** (np.floor(np.log10(value)) + 1 - len(digits)):
                leaks.append(shown)
    return leaks


def write_page(course, student, results, change=None):
    """Submit, book and write the page of one student."""
    hand_in(course, student, change)
    assert file_and_book(course, {student: report(*results)}) == {}
    return page_of(course, student)


def page_of(course, student):
    pages, problems = feedback.write_feedback(course, "fsdp")
    assert not problems.get(student), problems
    (path,) = (page for page in pages if page.parts[-3] == student)
    return path.read_text()


def stepped(points=5.0, verdict=PASS, **fields):
    """A result of ``fsdp_loss`` with a step, the course's own."""
    step = reference_step("fsdp", "fsdp_loss")
    assert step
    return Result("fsdp_loss", points, 5.0, verdict, timeline=to_summary(step), **fields)


def test_a_page_says_what_was_measured_first_in_words_and_asks_nobody(course):
    shared_fields = {"unit": Unit.RELATIVE, "case": "data=8"}
    details = {"naive": 8, "line": "gather_params:2", "message": "8 times too large"}
    fact = Fact("gradients", Kind.GRADIENTS, False, 7, 2e-5, **shared_fields, **details)
    passed = Fact("values", Kind.VALUES, True, 1.2e-7, 2e-5, **shared_fields)
    result = Result("gather_params", 1.5, 3.0, PARTIAL, (passed, fact), denied=("socket(AF_INET)",))
    html = write_page(course, "ada", [result, stepped()])
    page = Page(html)
    asks_for_nothing(page)
    assert html.count('<span class="marked">') == 1
    policy = dict(rule.split(maxsplit=1) for rule in page.meta["Content-Security-Policy"].split(";"))
    none = dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")
    assert policy == {**none, "style-src": "'unsafe-inline'"}
    assert page.meta["referrer"] == "no-referrer"
    assert page.text.index("8 times too large") < page.text.index("1.2e-07")
    phrases = ["1.5 / 3", MEANING[PARTIAL], "The scale of a gradient", "meshcraft hint fsdp gather_params"]
    phrases += ["meshcraft check fsdp gather_params", "socket(AF_INET)", "Trying costs nothing", "bubblewrap"]
    assert [words for words in phrases if words not in page.text] == []
    assert "#line-gather_params:2" in page.addresses and "line-gather_params:2" in page.ids
    assert {address[1:] for address in page.addresses} <= {*page.ids}


@pytest.mark.long
def test_both_steps_are_drawn_on_one_scale_and_the_sentence_has_the_reports_figures(course):
    result, _ = mutant("gathers_four_times")
    assert result.timeline and len(json.dumps(result.timeline)) <= 64_000
    facts = {fact.name: fact for fact in result.facts}
    page = Page(write_page(course, "bob", [result]))
    asks_for_nothing(page)
    assert page.tags.count("svg") == 1 and page.tags.count("desc") == 1
    assert "yours: " in page.text and "the course's own: " in page.text
    time, exposed = facts["predicted time"], facts["exposed communication"]
    assert (
        f"your step would take {time.measured_text} ms and the course's own {time.write(time.reference)} ms"
        in page.text
    )
    assert (
        f"hides takes {exposed.measured_text} ms of yours and {exposed.write(exposed.reference)} ms of the course's own"
        in page.text
    )
    assert "meshcraft profile fsdp fsdp_loss" in page.text


def test_the_reference_that_is_drawn_is_the_one_that_limits_are_set_against():
    figures, step = references("fsdp")["fsdp_loss"], reference_step("fsdp", "fsdp_loss")
    assert step and step.seconds == pytest.approx(figures["seconds"]["reference"], rel=1e-9)
    assert step.exposed_seconds == pytest.approx(figures["exposed"]["reference"], rel=1e-9)


@pytest.mark.parametrize("name", HIDDEN)
def test_no_hidden_value_is_in_the_report_or_on_the_page(name):
    result, hidden = mutant(name)
    assert result.verdict in (FAIL, PARTIAL)
    text = " ".join(f"{f.measured_text} {f.limit_text} {f.message}" for f in result.facts) + result.message
    page = Page(function_html("fsdp", result, {})).text
    assert leaked(text, hidden) == [] and leaked(page, hidden) == []
    assert leaked(json.dumps(result.to_json()), hidden) == []
    public, drawn = official(result.name, WRONG[name].function, secret=b"")
    assert leaked(" ".join(f.message for f in public.facts), drawn), "with public inputs the same message has values"
    assert public.timeline is None


@pytest.mark.long
def test_the_same_submission_gives_the_same_bytes():
    results = mutant("averages_the_loss")[0], official("fsdp_loss", WRONG["averages_the_loss"].function)[0]
    first, again = (json.dumps(result.to_json()) for result in results)
    assert first == again
    assert json.dumps(Result.from_json(json.loads(first)).to_json()) == first
    through = json.dumps(json.loads(first), sort_keys=True)
    assert json.dumps(Result.from_json(json.loads(through)).to_json()) == first, "as the ledger returns it"


def test_whatever_a_student_wrote_is_text(course):
    def change(notebook):
        cell(notebook, "question").source = f"{HOSTILE}\n\n[go](javascript:alert(1)) ![x](http://evil.example/y.png)"
        cell(notebook, "shard_params").source = f"# {HOSTILE}\n" * 3
        notebook.cells.append(nbformat.v4.new_code_cell(f"'''{HOSTILE}'''", id="mine"))

    summary = stepped().timeline
    assert summary
    texts = [HOSTILE[:100] if ":" in text else text for text in summary["texts"]]
    fields = {name: HOSTILE for name in ("measured", "limit", "of", "case", "message")}
    fact = Fact(HOSTILE, Kind.MEMORY, False, line="shard_params:2", **fields)  # type: ignore[arg-type]
    odd = Fact("values", Kind.VALUES, None, message=HOSTILE)
    results = [
        Result("shard_params", 1.0, 2.0, PARTIAL, (fact, odd), HOSTILE, HOSTILE, (HOSTILE,)),
        Result("gather_params", 0.0, 3.0, STUDENT_ERROR, (), HOSTILE, HOSTILE),
        Result("fsdp_loss", 5.0, 5.0, PASS, timeline={**summary, "texts": texts}),
    ]
    html = write_page(course, "eve", results, change)
    page = Page(html)
    asks_for_nothing(page)
    assert page.tags.count("svg") == 1, "its step is drawn all the same"
    assert "\x1b" not in html and "\u202e" not in html
    assert "<script>alert(1)</script>" in page.text, "and can be read"


def test_a_verdict_without_a_step_or_of_old_still_makes_a_page(course):
    old = Result("fsdp_loss", 5.0, 5.0, PASS, (Fact("values", Kind.VALUES, True, 1e-7, 2e-5),))
    assert Result.from_json(old.to_json()) == old
    html = write_page(course, "old", [old])
    assert "svg" not in Page(html).tags and MEANING[PASS] in html
    path, before = course / "autograded" / "old" / "fsdp" / "fsdp.ipynb", booked(course, "old")
    path.chmod(0o644)
    for function in before.metadata.meshcraft.functions:
        for name in {*function} - {"name", "verdict", "lines"}:
            del function[name]
    nbformat.write(before, path)
    assert "5 of 5 points" in Page(page_of(course, "old")).text


def test_a_step_that_cannot_be_read_is_left_out():
    step = stepped().timeline
    assert _picture(step) == step and [_picture(odd) for odd in (None, {"bars": 1}, "text")] == [None] * 3
    for broken in ({"bars": 1}, {**(stepped().timeline or {}), "seconds": -1}):
        assert "svg" not in function_html("fsdp", Result("fsdp_loss", 5.0, 5.0, PASS, timeline=broken), {})


def test_an_error_is_reported_with_its_type_its_message_and_the_students_own_line():
    ours = "/srv/grader/site-packages/jax/_src/core.py"
    phrases = f"TypeError: add got (8,) and (4,) at {ours}:12 and meshcraft-cell:fsdp_loss:9"
    result = Result("fsdp_loss", 0.0, 5.0, STUDENT_ERROR, (), "fsdp_loss:9", phrases)
    page = Page(function_html("fsdp", result, {"fsdp_loss:9": "    return a + b < c"}))
    assert "TypeError: add got (8,) and (4,) at core.py:12 and fsdp_loss:9" in page.text
    assert "return a + b < c" in page.text and "/srv" not in page.text and MEANING[STUDENT_ERROR] in page.text
    assert tidy("no layers/up/kernel and 1/2") == "no layers/up/kernel and 1/2"


def test_a_function_that_was_not_begun_is_no_error():
    message = "fsdp_loss is not written yet: it raises NotImplementedError"
    stub = Result("fsdp_loss", 0.0, 5.0, STUDENT_ERROR, (), "fsdp_loss:9", message, not_started=True)
    text = Page(function_html("fsdp", stub, {})).text
    assert "not started It is not written yet." in text and "error" not in text and "meshcraft hint fsdp" in text
    right = Result("shard_params", 2.0, 2.0, PASS)
    assert next_step("fsdp", [right, stub])["more"] == "It is not written yet."


def test_a_fault_of_the_grader_waits_for_a_person_and_its_words_are_not_the_students(course):
    fault = Result("fsdp_loss", 0.0, 5.0, NEEDS_HUMAN, message="KeyError: 'our own mistake'")
    page = Page(write_page(course, "flo", [fault]))
    assert "our own mistake" not in page.text and MEANING[NEEDS_HUMAN] in page.text
    other_points = sum(task.points for task in CONTRACT.tasks) - 5
    assert "waits for a person" in page.text and f"so far {other_points:g} / " in page.text


@pytest.mark.parametrize("verdict", [verdicts.REFUSED, verdicts.LIMIT_EXCEEDED])
def test_what_was_not_judged_says_why(verdict):
    result = Result("fsdp_loss", 0.0, 5.0, verdict, (), "fsdp_loss:3", "a loop until data says so")
    page = Page(function_html("fsdp", result, {}))
    phrases = (ABOUT_VERDICTS[verdict][1], MEANING[verdict], "a loop until data says so", "fsdp_loss:3")
    assert [words for words in phrases if words not in page.text] == []
    about, heading = ABOUT_VERDICTS[verdict]
    assert further_reading("fsdp", [result]) == (f'Read more about fsdp_loss: `meshcraft site {about} "{heading}"`',)


@pytest.mark.parametrize(("line", "hinted"), [("fsdp_loss:9", "fsdp_loss"), ("gather_params:3", "gather_params")])
def test_an_error_in_another_function_of_the_chapter_is_sent_to_its_hints(line, hinted):
    error = Result("fsdp_loss", 0.0, 5.0, verdicts.STUDENT_ERROR, (), line, "TypeError: no")
    *_, hint = further_reading("fsdp", [error])
    assert hint == f"Hints for {hinted}: `meshcraft hint fsdp {hinted}`"


def test_what_a_person_gave_and_what_being_late_costs_is_there(course):
    hand_in(course, "liz", answer="Because.")
    assert file_and_book(course, {"liz": report(Result("shard_params", 1.0, 2.0, PARTIAL))}) == {}
    with open_gradebook(course) as gradebook:
        where = (*WHERE, "liz")
        for name, score in (("check-shard_params", 1.75), ("question", 1.25)):
            gradebook.find_grade(name, *where).manual_score = score  # type: ignore[assignment]
        gradebook.find_comment("question", *where).manual_comment = f"Nearly. {HOSTILE}"  # type: ignore[assignment]
        gradebook.find_submission_notebook(*where).late_submission_penalty = 0.5  # type: ignore[assignment]
        gradebook.db.commit()
    page = Page(page_of(course, "liz"))
    asks_for_nothing(page)
    phrases = ["1.75 / 2 set by a person; the facts give 1", "1.25 / 2 graded by a person", "Nearly."]
    assert [words for words in (*phrases, "late submission −0.5", "all 18.5 / 20") if words not in page.text] == []


def test_pages_and_headings_that_students_are_sent_to_exist():
    for chapter in CHAPTERS:
        places = load(chapter.name).explained_in
        assert "values" in places, chapter.name
        for page, heading in (*places.values(), *ABOUT_VERDICTS.values()):
            headings = re.findall(r"^#+ (.*)$", (ROOT / "site" / "pages" / f"{page}.md").read_text(), re.MULTILINE)
            assert heading in headings and not re.search(r'[`*$\\"_]', heading), (page, heading)

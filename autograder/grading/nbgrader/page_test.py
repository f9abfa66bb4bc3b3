"""A feedback page leads with what to do next, and links to the section that explains it."""

from dataclasses import replace

import pytest
from nbformat.v4 import new_code_cell

from autograder.contract.task import load
from autograder.contract.verdict import FAIL, NEEDS_HUMAN, PASS, Fact, Kind, Result
from autograder.grading.nbgrader import people
from autograder.grading.nbgrader.conftest import POINTS, booked, cell, change, file_and_book, hand_in, report
from autograder.grading.nbgrader.feedback import write_feedback
from autograder.grading.nbgrader.page import _slug, function_html, next_step
from course.curriculum import CHAPTERS


def test_feedback_says_where_to_go_on_and_which_earlier_function_is_to_blame(term):
    def uses(notebook):
        cell(notebook, "fsdp_loss").source = "def fsdp_loss(*a):\n    return helper(*a)\n"
        cell(notebook, "gather_params").source = "def gather_params(*a):\n    pass\n"
        notebook.cells.append(new_code_cell("%%time\nx = (", id="odd"))
        notebook.cells.append(new_code_cell("def helper(*a):\n    return gather_params(*a)\n", id="helper"))

    change(term, site="https://example.org/meshcraft")
    hand_in(term, "ada", uses, answer="L*W & more")
    fact = Fact("gradients", Kind.GRADIENTS, False, 7, 2e-5)
    results = [Result(n, 0.0, POINTS[n], FAIL, (fact,)) for n in ("gather_params", "fsdp_loss")]
    assert file_and_book(term, {"ada": report(*results)}) == {}
    people.ask_regrade(term, "fsdp", "ada", "Why 7?")
    people.answer_regrade(term, "fsdp", "ada", "Eight devices, less one.")
    (page,), problems = write_feedback(term, "fsdp")
    text = page.read_text()
    assert problems == {} and text.index("What to do next") < text.index("gather_params</code></a>: ")
    assert "<code>fsdp_loss</code> uses <code>gather_params</code>, which is not right yet" in text
    assert "“gradients” is not met yet. After that, 1 more function." in text
    assert (
        'href="https://example.org/meshcraft/' in text and "A colleague proposes" in text and "L*W &amp; more" in text
    )
    assert "Why 7?" in text and "Eight devices, less one." in text and "model answer" not in text
    assert "passed; its facts" in text
    copy = booked(term, "ada")
    at = next(n for n, each in enumerate(copy.cells) if each.metadata.get("nbgrader", {}).get("grade_id") == "question")
    assert copy.cells[at - 1].source.startswith("**For graders: a model answer**\n\nKeeping the gathered weights")


def test_the_anchors_of_links_are_those_of_the_site():
    slugify = pytest.importorskip("markdown.extensions.toc").slugify
    for chapter in CHAPTERS:
        for _, heading in load(chapter.name).explained_in.values():
            assert _slug(heading) == slugify(heading, "-")


def test_the_next_step_when_nothing_is_right_and_when_everything_is():
    right, wrong = (Result("f", points, 1.0, verdict) for points, verdict in ((1.0, PASS), (0.0, FAIL)))
    assert next_step("fsdp", [right]) == {"sentence": "Every function passes."}
    assert "Nothing has earned points yet" in next_step("fsdp", [wrong])["sentence"]
    fault = replace(right, verdict=NEEDS_HUMAN, message="the grader failed 3 times")
    assert "A person will look at" in next_step("fsdp", [fault])["sentence"]
    text = function_html("fsdp", fault, {})
    assert "A person will grade this function" in text and "failed 3 times" not in text
    damaged = replace(fault, message="the upload is damaged: submit it again", unreadable=True)
    assert next_step("fsdp", [damaged]) == {"sentence": "The upload is damaged: submit it again."}
    assert "the upload is damaged: submit it again." in function_html("fsdp", damaged, {})

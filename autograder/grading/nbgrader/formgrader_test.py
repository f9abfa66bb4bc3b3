"""An instructor's session in nbgrader's formgrader, in a real browser that can reach nothing but this machine."""

import csv
import os
import re
from importlib.resources import files

import nbformat
import pytest
from playwright.sync_api import expect, sync_playwright

from autograder.grading.nbgrader.batch import grade_course
from autograder.grading.nbgrader.conftest import cell, hand_in
from autograder.grading.nbgrader.new_course import init_course
from autograder.grading.outside.sandbox import best_level
from autograder.proof.browser import CHROMIUM, LAB, browsing, saves, serving, wait_until_listening
from course.curriculum import ROOT

AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text()
FORGERY = """All-gather twice, **because** it frees memory.
<script>window.stolen = 1</script><img src="http://evil.example/x.png" onerror="window.stolen = 2">
<svg onload="window.stolen = 3"></svg><a href="javascript:window.stolen = 4" autofocus onfocus="window.stolen = 5">x</a>
"""

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="formgrader is not tested here: no Chromium on this machine; `make browser` installs it"
)


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A course with one graded submission: one function right, the others unchanged, and a written answer."""
    folder = tmp_path_factory.mktemp("teaching") / "course"
    init_course(folder, chapters=["fsdp"], due={}, settings={}, students=[{"id": "ada", "lms_user_id": "101"}])
    right = nbformat.read(ROOT / "autograder/proof/demo/submitted/right/fsdp/fsdp.ipynb", as_version=4)

    def solve(notebook):
        cell(notebook, "shard_params").source = cell(right, "shard_params").source

    hand_in(folder, "ada", solve, answer=FORGERY)
    (report,) = grade_course(folder, "fsdp", level=best_level())
    assert [result.verdict for result in report.functions] == ["pass", *["student_error"] * 4], report
    return folder


@pytest.mark.long
def test_a_person_sees_the_facts_gives_points_and_a_comment_and_both_arrive(course, meshcraft, monkeypatch, tmp_path):
    monkeypatch.chdir(course)
    (row,) = csv.DictReader(meshcraft("export", "fsdp").out.splitlines())
    assert (row["state"], row["points question"]) == ("waits for manual grading (score so far)", "")
    assert in_canvas(meshcraft) == ""

    with serving(LAB, course, tmp_path) as lab, browsing(lab.replace("/lab?", "/formgrader?")) as page:
        page.get_by_role("link", name="Manual Grading").click()
        for address in ("**/gradebook/fsdp", "**/gradebook/fsdp/fsdp"):
            page.locator("table").get_by_role("link", name="fsdp", exact=True).click()
            page.wait_for_url(address)
        page.get_by_role("link", name="Submission #1").click()
        question, comment = page.locator("#question"), page.locator("#question-comment")
        expect(question).to_have_class(re.compile("needs_manual_grade"))
        facts = page.locator(".output_area", has_text="shard_params").first.locator("table")
        expect(facts).to_contain_text("bytes")

        answer = page.locator(".nbgrader_cell", has=question)
        expect(answer).to_contain_text("All-gather twice, because it frees memory.")
        assert answer.locator("script, img, svg, a").count() == 0
        assert page.evaluate("window.stolen === undefined")

        with page.expect_response(lambda answer: saves(answer, "grade")) as saved:
            question.fill("1.5")
            question.press("Tab")
        assert saved.value.ok
        wait_until_listening(page, "question-comment")
        with page.expect_response(lambda answer: saves(answer, "comment")) as saved:
            comment.fill("Say how much memory.")
            comment.press("Escape")
        assert saved.value.ok

    (row,) = csv.DictReader(meshcraft("export", "fsdp").out.splitlines())
    assert (row["state"], row["score"], row["points question"]) == ("graded", "3.5", "1.5")
    assert in_canvas(meshcraft) == "3.5"
    meshcraft("feedback", "fsdp")
    feedback = (course / "feedback" / "ada" / "fsdp" / "fsdp.html").read_text()
    assert "1.5 / 2" in feedback and "Say how much memory." in feedback and "3.5 / 20" in feedback


def in_canvas(meshcraft):
    """Canvas's view: the score of the one student."""
    text = meshcraft("export", "--canvas", "--column", "fsdp=FSDP (4711)").out
    points, row = csv.DictReader(text.splitlines())
    assert (points["FSDP (4711)"], row["ID"], row["SIS Login ID"]) == ("20.0", "101", "ada")
    return row["FSDP (4711)"]


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_and_feedback_fit_a_phone_and_are_accessible(course, meshcraft, scheme):
    meshcraft("feedback", "fsdp", "--course", str(course))
    meshcraft("report", "fsdp", "--course", str(course), "--html", str(course / "report.html"))
    flags = ["--no-sandbox"] if os.getuid() == 0 else []
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=CHROMIUM, args=flags) as browser:
        for name in ("report.html", "feedback/ada/fsdp/fsdp.html"):
            page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme=scheme, bypass_csp=True)
            page.goto((course / name).as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") == 390, name
            page.evaluate(AXE)
            violations = page.evaluate(
                "axe.run(document, {resultTypes: ['violations']}).then((found) => found.violations)"
            )
            assert [each["id"] for each in violations if each["impact"] in ("serious", "critical")] == [], name

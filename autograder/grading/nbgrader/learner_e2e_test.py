"""A learner's session in JupyterLab, in a real browser: from fetching an assignment to receiving points for it."""

import csv
import os
import re

import nbformat
import pytest
from nbgrader.utils import determine_grade
from playwright.sync_api import expect

from autograder.chapters.fsdp.mutants import CUT
from autograder.grading.nbgrader.conftest import cell
from autograder.grading.nbgrader.teaching_test import init, nbgrader, score_by_hand, student_home
from autograder.proof.browser import CHROMIUM, PATIENCE, browsing, serving
from course.curriculum import ROOT

FULL = bool(os.environ.get("MESHCRAFT_FULL"))
RIGHT = nbformat.read(ROOT / "autograder/proof/demo/submitted/right/fsdp/fsdp.ipynb", as_version=4)
FUNCTION, FOLLOWING = "gather_params", "shard_params"
# Records the text of the status line below `check`'s cell, each time it changes.
WATCH = """() => {
    window.lines = [];
    const look = () => document.querySelectorAll(".jp-OutputArea-output > span").forEach(({innerText: said}) => {
        if (window.lines.at(-1) !== said) window.lines.push(said);
    });
    new MutationObserver(look).observe(document.body, {subtree: true, childList: true});
}"""

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="JupyterLab is not tested here: no Chromium on this machine; `make browser` installs it"
)


class Lab:
    """A notebook open in JupyterLab, and a learner's actions on it by mouse and keyboard."""

    def __init__(self, page, path):
        self.page, self.path, self.runs = page, path, 0
        expect(page.locator("#jp-main-statusbar")).to_contain_text("(ipykernel) | Idle")

    def cell(self, begin):
        source = self.page.locator(".cm-content", has_text=re.compile(rf"^{re.escape(begin)}"))
        return self.page.locator(".jp-CodeCell").filter(has=source)

    def write(self, begin, source):
        self.cell(begin).locator(".cm-content").click()
        self.page.keyboard.press("ControlOrMeta+a")
        self.page.keyboard.insert_text(source)

    def run(self, begin):
        """The output of a cell after running it."""
        code_cell = self.cell(begin)
        code_cell.locator(".cm-content").click()
        self.page.keyboard.press("Control+Enter")
        self.runs += 1
        expect(code_cell.locator(".jp-InputPrompt")).to_have_text(f"[{self.runs}]:")
        return code_cell.locator(".jp-OutputArea")

    def save(self):
        """Save; return the notebook as it is on disk."""
        with self.page.expect_response(
            lambda response: response.request.method == "PUT" and "/api/contents/" in response.url
        ) as put:
            self.page.keyboard.press("ControlOrMeta+s")
        assert put.value.ok
        return nbformat.read(self.path, as_version=4)

    def judge(self, source):
        """Write the function, save, run it and its check: return the display, and nbgrader's points for it."""
        self.write(f"def {FUNCTION}", source)
        self.save()
        self.run(f"def {FUNCTION}")
        shown = self.run(f"check({FUNCTION})")
        return shown, determine_grade(cell(self.save(), f"check-{FUNCTION}"))


@pytest.fixture
def home(tmp_path):
    """A student's folder with the assignment as fetched, complete except for one function; next to the course."""
    exchange = tmp_path / "exchange"
    init(tmp_path / "course", students=[{"id": "ada"}], name="dist", exchange=str(exchange))
    home = student_home(tmp_path, "ada", exchange)
    nbgrader((tmp_path / "course", "release_assignment fsdp"), (home, "fetch_assignment fsdp"))
    notebook = nbformat.read(home / "fsdp" / "fsdp.ipynb", as_version=4)
    for right in RIGHT.cells:
        name = right.metadata.get("nbgrader", {}).get("grade_id", "")
        if name and name != FUNCTION:
            cell(notebook, name).source = right.source
    cell(notebook, "question").source = "Keeping them costs memory for all layers at once."
    nbformat.write(notebook, home / "fsdp" / "fsdp.ipynb")
    return home


@pytest.mark.long
def test_wrong_hint_right_next_validated_handed_in_and_full_points(home, meshcraft, monkeypatch, tmp_path):
    monkeypatch.chdir(home)
    right = wrong = cell(RIGHT, FUNCTION).source
    for good, bad in CUT.items():
        wrong = wrong.replace(good, bad)
    assert wrong != right

    begin = ("autograder.cli", "start", "fsdp")
    with serving(begin, home, tmp_path) as address, browsing(address) as page:
        lab = Lab(page, home / "fsdp" / "fsdp.ipynb")
        page.get_by_role("menuitem", name="Nbgrader").click()
        expect(page.locator(".lm-Menu-content")).to_have_text("Assignment List")
        page.keyboard.press("Escape")
        page.evaluate(WATCH)
        lab.run("from typing import Any")

        shown, points = lab.judge(wrong)
        assert points == (1.5, 3.0)
        expect(shown).to_contain_text(f"partial {FUNCTION} 1.5 of 3 points")
        expect(shown.locator("td", has_text="✗").first).to_have_css("color", "rgb(229, 83, 75)")
        expect(shown).to_contain_text(re.compile(rf"your line {FUNCTION}:\d+ total = lax\."))
        expect(shown).to_contain_text("there is an all-reduce")
        assert "hint 1 of 4" in meshcraft("hint", "fsdp", FUNCTION).out

        shown, points = lab.judge(right)
        assert points == (3.0, 3.0)
        expect(shown).to_contain_text(f"pass {FUNCTION} 3 of 3 points")
        expect(shown).to_contain_text(f"Next: {FOLLOWING}.")
        assert re.search(rf"✓ +{FUNCTION} +passes", meshcraft("list", "fsdp").out)
        assert any("cases of grading" in line for line in page.evaluate("window.lines"))
        first = shown.locator(".jp-OutputArea-child").first.bounding_box()
        assert first["height"] == 0, "the line leaves a row behind"

        if FULL:
            page.get_by_role("button", name="Validate").click()
            expect(page.get_by_role("dialog")).to_contain_text("Success!", timeout=5 * PATIENCE)

    nbgrader((home, "submit fsdp"), (tmp_path / "course", "collect fsdp"))
    monkeypatch.chdir(tmp_path / "course")
    meshcraft("grade", "fsdp")
    score_by_hand(tmp_path / "course", "ada", 2.0)
    (row,) = csv.DictReader(meshcraft("export", "fsdp").out.splitlines())
    assert (row["state"], row["score"], row["max_score"]) == ("graded", "20.0", "20.0")

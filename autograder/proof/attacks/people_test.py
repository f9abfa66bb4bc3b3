"""A class of attacks on readers leaves only text on pages, in a terminal and in a spreadsheet."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
import unicodedata
from html.parser import HTMLParser

import pytest

from autograder import cli
from autograder.grading.inside.launch import Limits
from autograder.grading.nbgrader.batch import grade_course
from autograder.grading.nbgrader.feedback import write_feedback
from autograder.grading.nbgrader.names import name_problem, student_name
from autograder.grading.outside.sandbox import best_level
from autograder.proof.attacks.declared import CHAPTER
from autograder.proof.attacks.fixtures import find_attacks, prepare
from autograder.proof.attacks.suite import workplace
from autograder.proof.browser import CHROMIUM

pytestmark = pytest.mark.long

ATTACKS = [attack for attack in find_attacks() if attack.group == "reaches"]
# Folder names, some of which nbgrader accepts, and what each of them tries.
STUDENTS = {
    "formula with equals": "=cmd|' -C calc'!A0",
    "formula with plus": "+1+1",
    "formula with minus": "-2+3",
    "formula with at": "@SUM",
    "formula in full width": "\uff1d1+1",
    "formula after a space": " =1+1",
    "formula after a tab": "\t=1+1",
    "formula on a line of its own": "ann\n=1+1",
    "forged line": "ben\nmeshcraft: all submissions passed",
    "terminal escape": "\x1b[2J\x1b]0;run\x07eve",
    "reversed writing": "dan\u202egpj.exe",
    "script": "<script>document.title='run'<",
}
TAGS_THAT_ACT = {"script", "iframe", "object", "embed", "img", "link", "form", "base", "foreignobject", "image", "use"}


@pytest.fixture(scope="module")
def course():
    """Attacks and students with odd names whose submissions are not notebooks, graded, with feedback pages."""
    with workplace() as folder:
        course_folder = prepare(folder / "course", ATTACKS)
        for name in STUDENTS.values():
            path = course_folder / "submitted" / name / CHAPTER / f"{CHAPTER}.ipynb"
            path.parent.mkdir(parents=True)
            path.write_text("no notebook")
        grade_course(course_folder, CHAPTER, workers=2, level=best_level(), limits=Limits(wall_s=60.0, cpu_s=20))
        write_feedback(course_folder, CHAPTER)
        yield course_folder


def strange(text):
    """Characters that a terminal or a reader would mistake for something else."""
    return sorted({c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") and c != "\n"})


class Page(HTMLParser):
    """Everything in a page that could act: elements, handlers, addresses."""

    def __init__(self, text):
        super().__init__()
        self.acting = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.acting += [tag] if tag in TAGS_THAT_ACT else []
        for name, value in attrs:
            address = name.split(":")[-1] in ("href", "src", "srcset", "data", "action", "formaction", "background")
            if name.startswith("on") or (address and not (value or "").startswith("#")) or "url(" in (value or ""):
                self.acting.append(f"{name}={value}")


def pages(course):
    html_files = sorted((course / "feedback").rglob("*.html"))
    assert len(html_files) >= len(ATTACKS) - 1, "there are no pages to look at"
    return html_files


def test_each_attack_on_readers_gets_a_page_without_what_acts_or_misleads(course):
    page_texts = {path.parent.parent.name: path.read_text() for path in pages(course)}
    assert {attack.name for attack in ATTACKS} <= page_texts.keys()
    acting = {name: [*Page(text).acting, *strange(text)] for name, text in page_texts.items()}
    assert {name: things for name, things in acting.items() if things} == {}


def visit(page, folder):
    """The page's title after its scripts had time to run, and every address that the browser requested."""
    log = folder / f"{page.parent.parent.name}.json"
    done = subprocess.run(
        [
            str(CHROMIUM),
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"),
            *("--disable-component-update", "--disable-sync", "--disable-extensions", "--virtual-time-budget=2000"),
            *("--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}"),
            *(f"--log-net-log={log}", "--dump-dom", page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    events = json.loads(log.read_text())["events"]
    requests = {str(event.get("params", {}).get("url", "")) for event in events}
    return title and title[1], {address for address in requests if "example.org" in address}


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_that_could_run_a_script_and_load_an_image_does(tmp_path):
    """The control: a careless page does show what the next test looks for."""
    page = tmp_path / "careless" / CHAPTER / "page.html"
    page.parent.mkdir(parents=True)
    page.write_text(
        "<title>before</title><script>document.title='run'</script><img src='http://example.org/tracker.png'>"
    )
    title, requests = visit(page, tmp_path)
    assert title == "run" and requests == {"http://example.org/tracker.png"}


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_runs_and_loads_nothing_for_any_page(course, tmp_path):
    for page in pages(course):
        if "script" in page.read_text():
            title, requests = visit(page, tmp_path)
            assert (title, requests) == (f"{CHAPTER}: feedback", set()), page.parent.parent.name


@pytest.fixture
def meshcraft(course, monkeypatch, capfd):
    """Run the command on the course; return what it and its processes write to stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["meshcraft", *arguments, "--course", str(course)])
        with pytest.raises(SystemExit):
            cli.main()
        return capfd.readouterr()

    return run


@pytest.mark.parametrize("command", ["grade", "status", "feedback"])
def test_terminal_shows_no_character_that_acts_and_no_forged_line(meshcraft, command):
    written = meshcraft(command, CHAPTER)
    assert any(written)
    for text in written:
        assert strange(text) == []
        forged = ("meshcraft: all", "SYSTEM", '{"verdict"', "10 of 10 points")
        assert [line for line in text.splitlines() if line.startswith(forged)] == []


def test_csv_has_a_row_for_each_student_and_no_formula(meshcraft):
    text, _ = meshcraft("export", CHAPTER)
    assert strange(text.replace("\n", "")) == []
    rows = list(csv.reader(io.StringIO(text)))
    assert len(rows) >= len(ATTACKS) + len(STUDENTS) + 1
    cells = [cell for row in rows for cell in row]
    texts = [cell for cell in cells if not re.fullmatch(r"-?\d+(\.\d+)?", cell)]
    assert [text for text in texts if text.strip()[:1] in tuple("=+-@\uff1d\uff0b\uff0d\uff20")] == []
    assert [cell for cell in cells if "\n" in cell or "\r" in cell] == []


def test_names_that_nbgrader_cannot_take_need_a_person_and_say_why(meshcraft):
    listed = json.loads(meshcraft("status", CHAPTER, "--json").out)
    rows = {row["student"]: row for row in (listed["submissions"] if isinstance(listed, dict) else listed)}
    for name in STUDENTS.values():
        if name_problem(name):
            row = rows[student_name(name)]
            assert row["state"] == "needs a person" and name_problem(name) in row["why"]

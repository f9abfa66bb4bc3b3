"""A chapter in a course folder is built, checked, released and graded like ours, and the sandbox sees its wrapping."""

import json
import os
import subprocess
import sys

import pytest

from autograder.commands import new_chapter
from course.curriculum import ROOT

WORK = """
import json
import tempfile
from pathlib import Path

from autograder.commands import chapters, site
from autograder.commands.own_page import write_page
from autograder.contract.task import load
from autograder.grading.nbgrader.page import function_html
from autograder.check import check_solution
from autograder.grading.inside.intake import parse_notebook
from autograder.grading.nbgrader.new_course import init_course
from autograder.grading.nbgrader.keys import contract_hash
from autograder.grading.outside.pipeline import Grader
from autograder.grading.outside.sandbox import best_level
from autograder.grading.outside.workers import mounted, own_mounted
from autograder.release import notebook
from course.curriculum import CHAPTERS, PROBLEMS, ROOT, earlier, own_page

here = Path.cwd()
notebook.build(["novel"])
init_course(here, chapters=["novel"], due={}, settings={}, students=[], points={"novel.novel_mean": 6.0})
answers = json.loads((here / "source/novel/novel.ipynb").read_text())
wrong = json.dumps(answers).replace("lax.pmean(x.mean(0), axis_name)", "x.mean(0)")
with_lookup = json.dumps(answers).replace("    return lax.pmean", "    import solutions.novel\\\\n    return lax.pmean")
grader = Grader("novel", secret=b"0" * 32, level=best_level())
given = {"right": json.dumps(answers), "wrong": wrong, "looks": with_lookup}
found = {
    name: [(each.verdict, each.points, each.message) for each in grader.grade_notebook(
        parse_notebook("novel.ipynb", text.encode()), name).functions]
    for name, text in given.items()
}
report = grader.grade_notebook(parse_notebook("novel.ipynb", wrong.encode()), "wrong").functions[0]
grader.close()
places, advice = load("novel").places(report), function_html("novel", report, {}, site="https://example.org")
page = Path(tempfile.mkdtemp(dir=here / ".meshcraft")) / "novel.html"
write_page(own_page("novel"), page.parent, "novel")
contract_page = here / "chapters/novel/page.md"
contract_page.write_text(contract_page.read_text().replace("## The idea", "## Another idea"))
print(json.dumps({
    "names": [entry.name for entry in CHAPTERS][-1:],
    "problems": PROBLEMS,
    "earlier": [entry.name for entry in earlier("novel")] == [entry.name for entry in CHAPTERS if not entry.own],
    "solution": check_solution("novel", stretched=False).points,
    "mounted": [str(path.relative_to(here)) for path in own_mounted("novel")],
    "ours": [str(path) for path in mounted("novel") if "novel" in str(path.relative_to(ROOT))],
    "released": sorted(path.name for path in (here / "release/novel").rglob("*") if path.is_file()),
    "hash": len(contract_hash("novel")),
    "found": found,
    "places": places,
    "advice": advice,
    "page": page.read_text(),
    "address": site._address(page.parent, "novel", "What it costs"),
    "missing": [what for what, _ in chapters._headings(load("novel"))],
}))
"""


@pytest.mark.long
def test_a_chapter_of_a_course_folder_is_released_and_graded(tmp_path):
    course = tmp_path / "course"
    (course / "submitted").mkdir(parents=True)
    (course / "course.toml").write_text('name = "course"\n')
    (course / ".meshcraft").mkdir(mode=0o700)
    new_chapter.new_chapter("novel", title="A novel", course=course)
    taken = course / "chapters" / "fsdp"
    taken.mkdir()
    (taken / "chapter.toml").write_text('title = "Ours"\nsummary = ""\nfunctions = []\n')
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", WORK], cwd=course, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    output = json.loads(done.stdout.splitlines()[-1])
    assert output["names"] == ["novel"] and output["earlier"] and output["solution"] == 2 and output["hash"] == 64
    assert "another chapter's name" in output["problems"]["fsdp"]
    assert output["mounted"] == ["chapters/novel/wrapping.py", "chapters/novel/chapter.toml"] and output["ours"] == []
    handed_out = ["__init__.py", "chapter.toml", "hints.md", "novel.ipynb", "page.md", "wrapping.py"]
    assert output["released"] == handed_out
    results = output["found"]
    assert results["right"] == [["pass", 2.0, ""]] and results["wrong"][0][:2] == ["fail", 0.0]
    assert output["places"] == [["novel", "The idea"], ["novel", "What it costs"]]
    assert "on the course's page <code>novel</code>" in output["advice"]
    assert "meshcraft site novel" in output["advice"] and "example.org" not in output["advice"]
    assert output["address"] == "novel.html#What-it-costs" and "<h2" in output["page"] and "The idea" in output["page"]
    assert output["missing"] == ["chapters/novel/page.md has no heading “The idea”, which EXPLAINED_IN refers to"]
    assert results["looks"][0][0] == "student_error" and "No module named 'solutions.novel'" in results["looks"][0][2]

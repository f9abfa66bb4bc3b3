"""A verdict is filed under everything that can change it, and under nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autograder.grading.nbgrader.keys import contract_hash, sources
from course.curriculum import ROOT

JUDGE_ONE = """
import json, sys
from autograder.grading.nbgrader.jobs import Job, close_grader, grade_one
from autograder.grading.nbgrader.keys import fingerprint

notebook = open(sys.argv[1], "rb").read()
done = grade_one(Job("zero", "zero.ipynb", notebook, "ada", b"0" * 32, "unsafe-local", fingerprint("zero")))
close_grader()
files = [str(each.__file__) for each in [*sys.modules.values()] if getattr(each, "__file__", None)]
print(json.dumps({"fault": done.fault, "functions": len(done.report.functions), "files": files}))
"""


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("autograder/grading/nbgrader/report.py", False),
        ("autograder/grading/nbgrader/export.py", False),
        ("autograder/grading/nbgrader/submissions.py", False),
        ("autograder/render.py", False),
        ("autograder/chapters/fsdp/mutants.py", False),
        ("autograder/chapters/pipeline/__init__.py", False),
        ("course/training/loop.py", False),
        ("autograder/grading/nbgrader/jobs.py", True),
        ("autograder/grading/outside/judge.py", True),
        ("autograder/grading/inside/wording.py", True),
        ("autograder/contract/task.py", True),
        ("autograder/chapters/fsdp/references.json", True),
        ("autograder/chapters/closed_forms.py", True),
        ("course/program/memory.py", True),
        ("course/machines.toml", True),
        ("solutions/data_parallel.py", True),
    ],
)
def test_only_a_file_that_can_change_a_verdict_leads_to_judging_again(monkeypatch, file, counts):
    before, read = contract_hash("fsdp"), Path.read_bytes
    assert (ROOT / file).is_file()
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"# reworded" * (path == ROOT / file))
    assert (contract_hash("fsdp") != before) == counts


@pytest.mark.long
def test_everything_that_a_judging_process_loads_counts():
    stub, env = ROOT / "exercises/zero/zero.ipynb", {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", JUDGE_ONE, str(stub)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome["fault"] == "" and outcome["functions"] == 5
    loaded_files = {
        path for each in outcome["files"] if (path := Path(each)).is_relative_to(ROOT) and ".venv" not in path.parts
    }
    assert len(loaded_files) > 50 and not loaded_files - {*sources("zero")}

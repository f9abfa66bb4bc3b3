"""No answers inside: none of the files that the sandbox mounts holds an oracle, an expected value or an answer."""

import ast
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from autograder.contract.task import load
from autograder.grading.outside.workers import mounted
from course.curriculum import CHAPTERS, ROOT, earlier

NAMES = [entry.name for entry in CHAPTERS]
# Closed forms that exercises ask for: how leaves are split, what runs in a tick, which mesh is best.
FORBIDDEN = "oracle best expected split_spec ticks_of bytes_form most_bytes block_of copies_of spec_puzzle accumulated"
# Modules that the sandbox must not be able to import: those that judge, and those that hold answers.
PARTS = "mutants alternatives rings puzzles choice schedule step loss parts shared orders programs passes"
JUDGES = [
    *(f"autograder.{name}" for name in ("check", "learner", "release", "proof", "proof.mutants")),
    *(f"autograder.grading.{name}" for name in ("outside.judge", "outside.pipeline", "nbgrader.settings")),
    *(f"autograder.chapters.{name}.{part}" for name in NAMES for part in PARTS.split()),
    *(f"course.{name}" for name in ("puzzles", "validation", "validation.rings", "training")),
]


@cache
def shown(chapter):
    """Every Python file that is mounted."""
    files = []
    for path in mounted(chapter):
        files += [path] if path.suffix == ".py" else [p for p in path.rglob("*.py") if "__pycache__" not in p.parts]
    return tuple(path for path in files if not path.name.endswith("_test.py"))


@cache
def defined(path):
    """The functions that a file defines, at any depth."""
    tree = ast.walk(ast.parse(path.read_text()))
    return {node.name.lstrip("_") for node in tree if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("chapter", NAMES)
def test_no_answer_no_judge_and_no_later_solution_is_among_the_files_and_none_imports_one(chapter):
    before = {entry.name for entry in earlier(chapter)}
    exercise_names = {task.name for name in NAMES if name not in before for task in load(name).tasks}
    files = {str(path.relative_to(ROOT)): path for path in shown(chapter)}
    for name, path in files.items():
        assert not defined(path) & exercise_names, name
        if name.startswith("autograder/"):  # a notebook's lab may import modules that exist only on a learner's machine
            assert not defined(path) & {*FORBIDDEN.split()}, name
            assert not {*imported(path)} & {*JUDGES}, name
    assert {f"solutions/{name}.py" for name in NAMES} & {*files} == {f"solutions/{name}.py" for name in before}
    assert not {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files} & {*JUDGES}
    assert ("course/attention.py" in files) == (chapter == "context_parallel" or "context_parallel" in before)
    assert not [path for path in mounted(chapter) if path.suffix not in ("", ".py", ".toml", ".txt", ".json", ".csv")]


def test_contracts_and_answers_cannot_be_imported_where_only_these_files_are(tmp_path):
    for path in mounted("transformer_3d"):
        place = tmp_path / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(path)
    code = f"""
import importlib, json, sys
sys.path[:] = [p for p in sys.path if p != {str(ROOT)!r}]
sys.path.insert(0, {str(tmp_path)!r})
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
found, gone = [], []
for name in {JUDGES!r}:
    try:
        found.append(importlib.import_module(name).__name__)
    except ImportError as error:
        gone.append(name)
from autograder.contract import wrapping
from autograder.grading.inside import tracer
wrapped = sorted(wrapping.wrappings({CHAPTERS[0].name!r}))
print(json.dumps([found, len(gone), wrapped, wrapping.__file__]))
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    importable, missing, wrapped, file = json.loads(done.stdout)
    assert (importable, missing) == ([], len(JUDGES))
    assert wrapped == sorted(task.name for task in load(CHAPTERS[0].name).tasks)
    assert Path(file).parents[2] == tmp_path


@pytest.mark.parametrize("chapter", NAMES)
def test_no_case_tells_a_wrapper_more_than_its_given_data(chapter):
    """``given`` is plain data, and survives the transfer into the sandbox."""
    for task in load(chapter).tasks:
        for case in task.cases:
            given = task.complete(case).given
            assert json.dumps(json.loads(json.dumps(given))) == json.dumps(given), (task.name, case.name)

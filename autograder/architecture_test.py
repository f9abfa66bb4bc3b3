"""The architecture: the imports each layer may make, consistent naming, and what must not be in the repository."""

import ast
import re
import sys
import tomllib
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions

import grimp
import pytest

from course.curriculum import CHAPTERS, NOTEBOOKS, PRIMER, ROOT, earlier

OURS = ("course", "solutions", "autograder")


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            bare = node.module in OURS
            yield from (f"{node.module}.{alias.name}" for alias in node.names) if bare else [node.module]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


# Each folder is a layer: it imports only from those below it, and two layers on one line don't import each other.
LAYERS = """\
autograder.proof
autograder.cli
autograder.commands
autograder.similarity
autograder.grading.nbgrader
autograder.learner
autograder.check
autograder.checking
autograder.release
autograder.grading.outside
autograder.chapters autograder.render autograder.progress
autograder.grading.inside
autograder.contract
solutions
course"""
# Tests may import anything; mutants and alternatives are covered by the modules that import them.
EXEMPT = re.compile(r"_test$|\.(mutants|alternatives)(\.|$)|\.submitted\.|\.conftest$")


def test_imports_point_down():
    graph = grimp.build_graph(*OURS, cache_dir=None)
    for name in [name for name in graph.modules if EXEMPT.search(name) and not name.startswith("autograder.proof")]:
        graph.remove_module(name)
    up = graph.find_illegal_dependencies_for_layers([grimp.Layer(*line.split()) for line in LAYERS.split("\n")])
    assert not up, [
        (dependency.importer, dependency.imported, *(route.middle for route in dependency.routes)) for dependency in up
    ]


def test_no_modules_import_each_other_in_a_cycle():
    graph = grimp.build_graph(*OURS, cache_dir=None)
    TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules}).prepare()


def test_chapters_and_what_the_sandbox_shows_of_them_stand_alone():
    graph = grimp.build_graph("autograder", cache_dir=None)
    for entry in CHAPTERS:
        own = f"autograder.chapters.{entry.name}"
        for name in {own, *graph.find_descendants(own)}:
            if EXEMPT.search(name):
                continue
            imported = {other for other in graph.find_modules_directly_imported_by(name) if "chapters." in other}
            wraps = f"{name}.".startswith(f"{own}.wrapping.")
            fine = (
                r"autograder\.chapters\.\w+\.wrapping"
                if wraps
                else rf"{own}|autograder\.chapters\.(closed_forms|draws)"
            )
            assert all(re.match(rf"({fine})(\.|$)", other) for other in imported), (name, imported)


def test_a_solution_imports_only_earlier_ones():
    for entry in CHAPTERS:
        fine = {"course", *(f"solutions.{before.name}" for before in earlier(entry.name))}
        imported = {name for name in imports(ROOT / "solutions" / f"{entry.name}.py") if name.split(".")[0] in OURS}
        up = {name for name in imported if not any(f"{name}.".startswith(f"{good}.") for good in fine)}
        assert not up, f"{entry.name} may import {sorted(fine)} and imports {sorted(up)}"


@pytest.mark.parametrize("chapter", [entry.name for entry in CHAPTERS])
def test_all_files_of_a_chapter_share_its_name(chapter):
    own = ("__init__.py", "hints.md", "references.json", "mutants.py", "alternatives.py", f"{chapter}_test.py")
    places = [f"solutions/{chapter}.py", f"exercises/{chapter}/{chapter}.ipynb"]
    places += [f"autograder/chapters/{chapter}/{name}" for name in own]
    places += [f"site/pages/{chapter}.md", f"site/pages/profiling/{chapter}.md"]
    assert [place for place in places if not (ROOT / place).is_file()] == []


def test_the_primer_is_a_page_and_a_notebook_and_no_chapter_and_nothing_else_is_an_exercise():
    for place in ("solutions/primer.py", "exercises/primer/primer.ipynb", "site/pages/primer.md"):
        assert (ROOT / place).is_file(), place
    assert PRIMER not in CHAPTERS and not (ROOT / "autograder" / "chapters" / PRIMER.name).exists()
    assert sorted(p.name for p in (ROOT / "exercises").iterdir()) == sorted(entry.name for entry in NOTEBOOKS)


def test_constraints_pin_everything_that_is_installed_and_name_no_host():
    text = (ROOT / "constraints.txt").read_text()
    assert not re.search(r"https?:|--|file:", text)
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(
        re.fullmatch(r'[\w.\-]+==[\w.+!]+(; python_(full_)?version (<|>=) "3\.1[12](\.\d+)?")?', line) for line in lines
    )


def test_every_package_that_is_imported_is_a_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["cluster"]]
    declared = {re.split(r"[^\w-]", line)[0].lower() for line in lines}
    given = {*sys.stdlib_module_names, *OURS, "jaxlib", "distributed", "setuptools"}  # with jax, dask, and building
    distributions, missing = packages_distributions(), {}
    for path in (path for folder in OURS for path in (ROOT / folder).rglob("*.py")):
        if path.name.endswith(("_test.py", "conftest.py")) or "proof" in path.parts:
            continue
        for package in {name.partition(".")[0] for name in imports(path)} - given:
            names = {each.lower().replace("_", "-") for each in distributions.get(package, [package])}
            if not names & declared:
                missing[package] = str(path)
    assert not missing


def test_no_file_is_where_it_would_break_something():
    assert not list((ROOT / "site").rglob("__init__.py"))
    assert not list((ROOT / "exercises").rglob("*.py"))
    assert not list(ROOT.glob("uv.lock"))


def test_public_functions_of_the_course_have_docstrings():
    for path in (ROOT / "course").rglob("*.py"):
        for node in [] if path.name.endswith("_test.py") else ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path.name}: {node.name} has no docstring"


# Names that do not say what a value is, and words that leave a docstring without a verb or a noun.
VAGUE = {"found", "said", "told", "asked", "held", "spent", "beside"}
OPENERS = re.compile(r"(Whether|What|Who|Whose|How|Where|Which|When)\b")
WRITTEN_BY_OTHERS = re.compile(r"/(hostile-cells|corpus)/")


def problems_of_language(tree):
    """Vague names and docstrings with a forbidden opening; fields of classes are left out, since data is recorded."""
    fields = {
        node.target
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        for node in owner.body
        if isinstance(node, ast.AnnAssign)
    }
    for node in ast.walk(tree):
        name = getattr(node, "name", "")  # of a function, a class, an import or a caught exception
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store) and node not in fields:
            name = node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            name = node.arg
        if name in VAGUE:
            yield f"line {getattr(node, 'lineno', 0)}: {name!r} does not say what it is"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node) or ""
            if OPENERS.match(text):
                yield f"{text.splitlines()[0]!r} begins like a question"


@pytest.mark.parametrize("folder", [*OURS, "site"])
def test_no_name_is_vague_and_no_docstring_begins_like_a_question(folder):
    problems = {
        str(path): messages
        for path in (ROOT / folder).rglob("*.py")
        if not WRITTEN_BY_OTHERS.search(str(path))
        and (messages := list(problems_of_language(ast.parse(path.read_text()))))
    }
    assert not problems


def test_a_vague_name_and_a_question_are_problems():
    source = (
        'def f(found):\n    """Whether it is."""\n    return [said for said in found]\n\nclass Row:\n    found: int\n'
    )
    assert len(list(problems_of_language(ast.parse(source)))) == 3

"""The build: its rules, and that it produces the same bytes every time."""

import importlib
import inspect
import re
from types import SimpleNamespace

import nbformat
import pytest

from autograder.contract.task import load
from autograder.release import notebook
from course.curriculum import CHAPTERS, NOTEBOOKS, PRIMER, ROOT

MODULE = '''# %% [markdown]
# # A chapter

# %%
import math

# %%
def twice(x):
    """Two of them."""
    ### BEGIN SOLUTION
    return 2 * x
    ### END SOLUTION

# %% [markdown]
# ### BEGIN SOLUTION
# Because.
# ### END SOLUTION

# %%
if __name__ == "__main__":
    # a lab
    print(twice(math.pi))
'''


def contract(**points):
    tasks = [SimpleNamespace(name=name, points=worth, at_scale=None) for name, worth in points.items()]
    return lambda chapter: SimpleNamespace(tasks=tasks, question_points=2.0)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.setattr("autograder.contract.task.load", contract(twice=3))
    (tmp_path / "solutions").mkdir()

    def write(text):
        (tmp_path / "solutions" / "small.py").write_text(text)
        return tmp_path

    return write


def cells_of(root):
    notebook.build(["small"], root=root)
    return nbformat.read(root / "exercises" / "small" / "small.ipynb", as_version=4).cells


def test_build_strips_solutions_adds_locked_checks_and_bares_the_lab(repository):
    helper = "# %%\ndef helper(x):\n    return x\n\n"
    module = MODULE.replace("# %%\ndef twice", helper + helper + "# %%\ndef twice")
    cells = cells_of(repository(module.replace("    # a lab", "    # --8<-- [start:lab]\n    # a lab")))
    assert [cell.id for cell in cells[2:6]] == ["helper", "helper-2", "twice", "check-twice"]
    assert len({cell.id for cell in cells}) == len(cells)
    assert [number for number, cell in enumerate(cells) if "nbgrader" in cell.metadata] == [4, 5, 6]
    _, first, _, _, stub, check, question, lab = cells
    assert first.source == "import math\n\nfrom autograder.check import check"
    raises = "    # YOUR CODE HERE\n    raise NotImplementedError()"
    assert stub.source == f'def twice(x):\n    """Two of them."""\n{raises}'
    roles = check.metadata.nbgrader
    assert check.source == "check(twice)" and check.metadata.editable is False
    assert (roles.grade_id, roles.points, roles.grade, roles.locked) == ("check-twice", 3.0, True, True)
    assert stub.metadata.nbgrader.grade_id == "twice" and question.source == "YOUR ANSWER HERE"
    assert question.metadata.nbgrader.points == 2.0 and question.metadata.nbgrader.solution
    assert lab.source == "# a lab\nprint(twice(math.pi))"


def test_rebuilding_is_byte_identical_leaves_nothing_else_and_says_what_would_change(repository):
    root = repository(MODULE)
    (path,) = notebook.build(["small"], root=root)
    first = path.read_bytes()
    notebook.build(["small"], root=root)
    assert path.read_bytes() == first
    assert notebook.stale("small", root=root) == ""
    files = {str(file.relative_to(root)) for file in root.rglob("*") if file.is_file()}
    assert files == {"solutions/small.py", "exercises/small/small.ipynb"}
    repository(MODULE.replace("Two of them", "Both of them"))
    assert "Both of them" in notebook.stale("small", root=root)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("def twice(x):", "def one(): ...\ndef twice(x):", r"small.py:7: .* one, twice; split"),
        ("def twice(x):", "class Twice:", r"small.py:7: .* found no function"),
        ("def twice(x):", "def thrice(x):", r"small.py:7: no task .* is called 'thrice' \(it has: twice\)"),
        ("    ### END SOLUTION\n\n#", "\n#", r"small.py:7: found 1 '### BEGIN SOLUTION' and 0"),
        ("# ### BEGIN SOLUTION\n# Because.\n# ### END SOLUTION", "# Because.", r"small.py: no question"),
        ("    # a lab\n", '    x = """a\nb"""\n', r"small.py:19: the lab's body changes when dedented"),
        ("import math\n", "import math\n1 +\n", r"small.py:4: the cell is not Python"),
        ("import math\n", "import math\n# ;--8<-- [start:x]\n", r"small.py:4: a section mark is a line of its own"),
    ],
)
def test_an_error_about_a_module_says_where_it_is_and_what_to_do(repository, old, new, message):
    assert old in MODULE
    with pytest.raises(notebook.BuildError, match=message):
        notebook.source_notebook("small", root=repository(MODULE.replace(old, new)))


def test_a_task_without_a_cell_is_an_error(repository, monkeypatch):
    root = repository(MODULE)
    monkeypatch.setattr("autograder.contract.task.load", contract(twice=3, forgotten=1))
    with pytest.raises(notebook.BuildError, match=r"small.py: no solution cell for the contract's forgotten"):
        notebook.source_notebook("small", root=root)


@pytest.mark.parametrize("entry", NOTEBOOKS, ids=lambda entry: entry.name)
def test_the_committed_exercise_is_what_a_build_gives_estimates_every_function_and_has_no_solution(entry):
    chapter = entry.name
    assert notebook.stale(chapter) == "", f"run `meshcraft build {chapter}`"
    text = (ROOT / "exercises" / chapter / f"{chapter}.ipynb").read_text()
    assert not re.findall(r"SOLUTION|§|8<--|### [A-Z]{2}|make serve|site/pages", text)
    assert re.findall(r"\*(\w+, about \d+ minutes); [\d.]+ points?\.\*", text) == [
        function.text.capitalize() for function in entry.functions
    ]
    solved = notebook.source_notebook(chapter)
    other_text = "\n".join(cell.source for cell in solved.cells if notebook.BEGIN not in cell.source)
    answers = [line for cell in solved.cells if notebook.BEGIN in cell.source for line in region(cell.source)]
    # A line may also occur in a cell that the learner is given, such as the version to start from.
    assert (answers or chapter == PRIMER.name) and not [a for a in answers if a in text and a not in other_text]


@pytest.mark.parametrize("chapter", [entry.name for entry in CHAPTERS])
def test_every_argument_of_a_graded_function_is_described_on_a_line_of_its_own(chapter):
    solution = importlib.import_module(f"solutions.{chapter}")
    for task in load(chapter).tasks:
        function = getattr(solution, task.name)
        described, _, arguments = (inspect.getdoc(function) or "").partition("Args:\n")
        heads = re.findall(r"^    (\w+): ", arguments.split("\n\n")[0], re.MULTILINE)
        named = list(inspect.signature(function).parameters)
        assert heads == named or "arguments as for" in described, task.name


def region(source):
    inside = source.split(notebook.BEGIN)[1].split(notebook.END)[0]
    return [line.strip() for line in inside.splitlines() if len(line.strip()) > 30]


LAB = 'if __name__ == "__main__":\n    # --8<-- [start:shown]\n    print(math.pi)\n    # --8<-- [end:shown]\n'
STORY = f"{MODULE.split('# %%' + chr(10) + 'def twice')[0]}# %%\n{LAB}"


def test_the_primer_is_built_without_roles_checks_or_a_contract_and_has_no_solution(tmp_path):
    (tmp_path / "solutions").mkdir()
    (tmp_path / "solutions" / "primer.py").write_text(STORY)
    (path,) = notebook.build([PRIMER.name], root=tmp_path)
    cells = nbformat.read(path, as_version=4).cells
    opening = (
        f"# A chapter\n\nThe theory is on the page “{PRIMER.title}”: `meshcraft site primer` opens it in a browser."
    )
    assert [cell.source for cell in cells] == [opening, "import math", "print(math.pi)"]
    assert not any("nbgrader" in cell.metadata for cell in cells)
    assert notebook.stale(PRIMER.name, root=tmp_path) == ""
    (tmp_path / "solutions" / "primer.py").write_text(MODULE)
    with pytest.raises(notebook.BuildError, match=r"primer.py:7: found '### BEGIN SOLUTION', and primer asks for"):
        notebook.source_notebook(PRIMER.name, root=tmp_path)

"""Copies are found, honest answers are not, nothing is run, and one odd submission costs one row."""

import ast
import importlib
import json
import textwrap
from dataclasses import replace
from types import SimpleNamespace

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from autograder import cli
from autograder.contract.task import load, trace
from autograder.contract.verdict import PASS, Report, Result
from autograder.grading.inside.intake import Cell
from autograder.grading.nbgrader.course import open_ledger
from autograder.grading.nbgrader.submissions import find_submissions
from autograder.proof.alternatives.rewrites import decorated, renamed, with_a_helper, with_named_results
from autograder.similarity.classes import find_similar
from autograder.similarity.compare import LEAST, compare
from autograder.similarity.page import EVIDENCE, page
from autograder.similarity.sources import Author, public_code, read_code, released_grams
from autograder.similarity.tokens import MOST, tokens
from course.curriculum import ROOT
from course.program import form, parse

DISGUISES = ((renamed,), (renamed, with_named_results), (renamed, with_a_helper, decorated))
TASKS = ("f", "g")
ORIGINAL = '''
import jax.numpy as jnp
from jax import lax

def shifted(x, axis, by):
    size = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(i, (i + by) % size) for i in range(size)])

def halves(x):
    middle = len(x) // 2
    return x[:middle], x[middle:]

def f(x, axis):
    """Both ways."""
    low, high = halves(x)
    parts = []
    for step in range(1, lax.axis_size(axis)):
        low, high = shifted(low, axis, 1), shifted(high, axis, -1)
        parts.append(jnp.concatenate([low, high]) * step)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
'''
COPIES = {
    "identical": ORIGINAL,
    "helpers in another order, other names": """
import jax
import jax.numpy as np

def f(values, name):
    first, second = in_two(values)
    every = []
    for k in range(1, jax.lax.axis_size(name)):
        first, second = turn(first, name, 1), turn(second, name, -1)
        every.append(np.concatenate([first, second]) * k)
    result = every[0]
    for one in every[1:]:
        result = result + one
    return result

def in_two(values):
    half = len(values) // 2
    return values[:half], values[half:]

def turn(block, name, places):
    n = jax.lax.axis_size(name)
    return jax.lax.ppermute(block, name, [(d, (d + places) % n) for d in range(n)])
""",
    "annotated, talkative, with magics": """
%matplotlib inline
import jax.numpy as jnp
from jax import lax
from jax.lax import ppermute as send

def shifted(x: jnp.ndarray, axis: str, by: int) -> jnp.ndarray:
    '''Moves x.'''
    size: int = lax.axis_size(axis)
    assert size > 0
    print("moving", x.shape)
    pairs = [(i, (i + by) % size) for i in range(size)]
    return send(x, axis, pairs)

halves = lambda x: (x[:len(x) // 2], x[len(x) // 2:])

def f(x: jnp.ndarray, axis: str) -> jnp.ndarray:
    low, high = halves(x)
    parts: list = []
    for step in range(1, lax.axis_size(axis)):
        # one step
        low = shifted(low, axis, 1)
        high = shifted(high, axis, -1)
        parts.append(jnp.concatenate([low, high]) * step)
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total
""",
}
OTHER = """
import jax.numpy as jnp
from jax import lax

def f(x, axis):
    n = lax.axis_size(axis)
    up, down = [(i, i + 1) for i in range(n - 1)] + [(n - 1, 0)], [(i + 1, i) for i in range(n - 1)] + [(0, n - 1)]
    cut = x.shape[0] // 2

    def body(step, carry):
        total, a, b = carry
        a, b = lax.ppermute(a, axis, up), lax.ppermute(b, axis, down)
        return total + (step + 1.0) * jnp.append(a, b, axis=0), a, b

    return lax.fori_loop(0, n - 1, body, (jnp.zeros_like(x), x[:cut], x[cut:]))[0]
"""


def of(source, name="f", author="someone", released=frozenset(), tasks=TASKS):
    written = read_code([Cell("cell", textwrap.dedent(source))]).written(name, Author(author), tasks, released)
    assert written
    return written


def share(first, second):
    return compare("f", [replace(first, author=Author("a")), replace(second, author=Author("b"))], floor=-1).matches[0]


COPIES["in a text that is run"] = (
    f"TEXT = {ORIGINAL!r}\nspace = {{}}\nexec(TEXT, space)\ndef f(x, axis):\n    return space['f'](x, axis)\n"
)
COPIES["looked up by its name"] = (
    ORIGINAL.replace("def f(", "def inner(") + "\ndef f(x, axis):\n    return globals()['inner'](x, axis)\n"
)


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_shares_most_and_an_independent_answer_little(name):
    copied, honest = share(of(ORIGINAL), of(COPIES[name])).share, share(of(ORIGINAL), of(OTHER)).share
    assert copied > 0.6 > 0.3 > honest, (copied, honest)


PAIRS = {
    "a comprehension": ("out = []\nfor i in range(n):\n    out.append(g(i))", "out = [g(i) for i in range(n)]"),
    "a method": ("y = jnp.sum(x, axis=0)", "y = x.sum(axis=0)"),
    "a module's other name": ("y = jnp.tanh(x)", "y = jax.numpy.tanh(x)"),
    "in place": ("y = y * 2", "y *= 2"),
    "two in one": ("a, b = x, y", "a = x\nb = y"),
    "turned round": ("z = x > y", "z = y < x"),
    "an expression of if": ("return 1 if x else 2", "return 1 if x else 2  # which"),
    "keywords in another order": ("y = g(x, one=1, two=2)", "y = g(x, two=2, one=1)"),
    "a named result": ("y = x + 1\nreturn y", "return x + 1"),
    "a walrus": ("y = x + 1", "(y := x + 1)"),
    "said": ("y = x", "print(x)\ny = x\n'a text'\npass"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_two_ways_to_write_the_same_read_the_same(name):
    def read(body):
        tree = ast.parse(f"def f(x):\n{textwrap.indent(body, '    ')}")
        return [(t.text, t.name) for t in tokens(tree.body[0], {"jax": "", "jnp": "", "f": "f"})]

    one, other = map(read, PAIRS[name])
    grew = [("List", "")] if name == "a comprehension" else []
    assert sorted(one) == sorted([*other, *grew]) if grew else one == other


def copied(code, name, tasks, disguise):
    """The submission of somebody who hides a copy of a function and its helpers."""
    used = code._used(name, set(tasks) - {name})
    definition = ast.parse(ast.unparse(code.pieces[name].node)).body[0]
    if not isinstance(definition, ast.FunctionDef):
        return None
    tree = ast.Module([definition], [])
    for rewrite in disguise:
        tree = rewrite(tree)
    imports = [s for t in code.trees for s in t.body if isinstance(s, ast.Import | ast.ImportFrom)]
    helpers = [piece.node for piece in used if piece is not code.pieces[name]]
    cells = [Cell(str(i), ast.unparse(ast.fix_missing_locations(s))) for i, s in enumerate([*imports, *helpers, tree])]
    submission = read_code(cells)
    submission.pieces[name] = submission.pieces[definition.name]
    return submission


@pytest.mark.parametrize("chapter", ["collectives", "data_parallel", "pipeline", "tensor_parallel"])
def test_every_disguised_copy_ranks_above_every_two_honest_answers(chapter):
    tasks = [task.name for task in load(chapter).tasks]
    released = released_grams([ROOT / "exercises" / chapter / f"{chapter}.ipynb"], tasks)
    by_function = {}
    for name, author, code in public_code(chapter, tasks):
        by_function.setdefault(name, []).append((author.name, replace(code, pieces=dict(code.pieces))))
    planted, honest = [], []
    for name, codes in by_function.items():
        answers = [code.written(name, Author(who), tasks, released) for who, code in codes]
        for second in answers[1:]:
            if min(len(answers[0].grams), len(second.grams)) >= LEAST:
                honest.append(share(answers[0], second).share)
        for code, answer in zip((code for _, code in codes), answers, strict=True):
            copies = [copied(code, name, tasks, disguise) for disguise in DISGUISES]
            if len(answer.grams) > LEAST:
                planted += [
                    share(answer, copy.written(name, Author("copy"), tasks, released)).score for copy in copies if copy
                ]
    assert len(planted) > 30 and len(honest) > 7
    assert min(planted) > 0.8 > 0.6 > max(honest)


def test_common_code_and_released_code_are_no_match():
    crowd = [replace(of(ORIGINAL), author=Author(f"student {i}")) for i in range(8)]
    assert not compare("f", crowd).matches
    two = [*(replace(of(OTHER), author=Author(f"other {i}")) for i in range(2)), *crowd[:6]]
    (match, *_) = compare("f", two).matches
    assert {match.first.author.name, match.second.author.name} == {"other 0", "other 1"} and match.others == 0
    released = frozenset(of(ORIGINAL).grams)
    assert not of(ORIGINAL, released=released).grams


def test_the_same_program_counts_by_how_rare_it_is():
    rare = [replace(of(source), author=Author(f"r{i}"), form="rare") for i, source in enumerate((ORIGINAL, OTHER))]
    lone = [replace(of(f"def f(x):\n    return x + {i}"), author=Author(f"s{i}"), form="usual") for i in range(6)]
    (match,) = compare("f", [*rare, *lone]).matches
    assert match.program and match.program_others == 0 and match.score == 0.5 and match.share < 0.3


@pytest.fixture
def klass(tmp_path):
    def hand_in(student, *sources, folder="course", text=None):
        path = tmp_path / folder / "submitted" / student / "collectives" / "collectives.ipynb"
        path.parent.mkdir(parents=True)
        cells = [new_code_cell(textwrap.dedent(source)) for source in sources]
        path.write_text(text if text is not None else nbformat.writes(new_notebook(cells=cells)))
        return tmp_path / folder

    return SimpleNamespace(hand_in=hand_in, path=tmp_path / "course")


RING = "ring_all_gather"


def ring(source):
    return source.replace("def f(", f"def {RING}(")


def test_a_class_is_compared_with_itself_with_earlier_years_and_with_the_public_solution(klass, tmp_path):
    solution = (ROOT / "solutions" / "collectives.py").read_text()
    klass.hand_in("ada", ring(ORIGINAL))
    klass.hand_in("bob", ring(COPIES["helpers in another order, other names"]))
    klass.hand_in("joe", ring(OTHER))
    klass.hand_in("eve", solution.replace("whole", "w").replace("chunk", "c").replace("to_next", "pairs"))
    before = klass.hand_in("zoe", ring(OTHER), folder="2025")
    klass.hand_in("joe", ring(OTHER), folder="2025")  # repeating students don't match their own work
    similar = find_similar(klass.path, "collectives", [RING], [before])
    pairs = {(m.first.author.name, str(m.second.author)) for m in similar.functions[0].matches}
    assert pairs == {("ada", "bob"), ("joe", "zoe (2025)"), ("eve", "public solution")}
    assert similar.functions[0].like_public == 1 and not similar.unread


def test_programs_are_those_that_grading_stored_for_the_current_submission(klass):
    task = load("collectives").task(RING)
    solution = importlib.import_module("solutions.collectives").ring_all_gather
    public = form(parse(trace(task, solution, task.cases[0], lambda _: None)))
    for student, student_form in (("ada", public), ("bob", "other"), ("joe", "other"), ("zoe", "other")):
        klass.hand_in(student, ring(f"x = '{student}'\n" + (OTHER if student in ("bob", "zoe") else ORIGINAL)))
        (submission,) = [each for each in find_submissions(klass.path, "collectives") if each.student == student]
        result = Result(RING, 2.0, 2.0, PASS, form=student_form)
        with open_ledger(klass.path) as ledger:
            ledger.submit(
                "collectives", student, submission.key, submission.digest if student != "zoe" else "an older one"
            )
            ledger.record(submission.key, Report("collectives", (result,), student))
    (compared,) = find_similar(klass.path, "collectives", [RING]).functions
    alike = {frozenset((m.first.author.name, m.second.author.name)): m.program for m in compared.matches}
    assert alike[frozenset(("ada", "public solution"))] is True and alike[frozenset(("bob", "joe"))] is True
    assert alike[frozenset(("bob", "zoe"))] is None and alike[frozenset(("ada", "joe"))] is False


def test_one_odd_submission_costs_one_row_and_nothing_is_run(klass, tmp_path):
    klass.hand_in("ada", ring(ORIGINAL))
    klass.hand_in("bob", ring(COPIES["annotated, talkative, with magics"]))
    klass.hand_in("c1", f"open({str(tmp_path / 'was run')!r}, 'w')\n" + ring(OTHER))
    deep = f"def {RING}(x, axis_name):\n    return "
    klass.hand_in("c2", deep + "-" * 3000 + "x")
    klass.hand_in("c3", deep + "(" * 150 + "x" + ")" * 150)
    klass.hand_in("c4", deep + "+".join(["x"] * 5000))
    klass.hand_in("c5", "def (")
    klass.hand_in("c6", text="{")
    klass.hand_in("c7", "x = 1")
    klass.hand_in("c8", deep + "x" + ".T" * 5000)
    klass.hand_in("c9", deep + f"[{'1,' * 30_000}]")
    klass.hand_in("d0", deep + "9" * 5000)
    similar = find_similar(klass.path, "collectives", [RING])
    best = similar.functions[0].matches[0]
    assert {best.first.author.name, best.second.author.name} == {"ada", "bob"}
    unread = {author.name for author, _ in similar.unread}
    assert unread >= {"c2", "c4", "c5", "c6", "c7", "c8"} and not unread & {"ada", "bob", "c1"}
    assert not (tmp_path / "was run").exists()


def test_a_source_without_end_is_cut():
    assert len(tokens(ast.parse(f"x = [{'1,' * 30_000}]").body[0], {})) == MOST


def test_the_command_says_that_it_is_evidence_and_the_page_shows_both_sources_escaped(klass, monkeypatch, capsys):
    script = "<script>alert(1)</script>"
    klass.hand_in("ada", ring(ORIGINAL).replace('"""Both ways."""', f'"""{script}"""'))
    klass.hand_in("bob", ring(ORIGINAL))
    klass.hand_in("<b>joe", ring(OTHER))

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["meshcraft", "similar", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, capsys.readouterr()

    written = klass.path / "similar.html"
    status, printed = run("collectives", "--course", str(klass.path), "--function", RING, "--html", str(written))
    assert status == 0 and "evidence, not a verdict" in printed.out and "ada" in printed.out
    text = written.read_text()
    assert EVIDENCE in text and script not in text and "&lt;script&gt;" in text and "<script" not in text
    assert text.count('<span class="rare">') > 10 and "default-src 'none'" in text and "http:" not in text
    assert written.stat().st_mode & 0o077 == 0
    status, printed = run("collectives", "--course", str(klass.path), "--json")
    report = json.loads(printed.out)
    (match,) = next(each for each in report["functions"] if each["name"] == RING)["matches"]
    assert status == 0 and report["note"] == EVIDENCE and match["share"] == 1 and match["program"]["same"] is None
    for wrong in (("nosuch",), ("collectives", "--function", "nosuch"), ("collectives", "--course", "nosuch")):
        assert run(*wrong)[0] == 2
    odd = page(find_similar(klass.path, "collectives", ["ring_all_reduce"]))
    assert odd.count("is not defined") == 2 and "&lt;b&gt;joe" in odd and "<b>" not in odd

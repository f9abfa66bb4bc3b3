"""A course's variants: stated in its notebook, and judged the same everywhere."""

import os
import re
from itertools import product

import nbformat
import numpy as np
import pytest

from autograder.check import check, check_notebook
from autograder.contract.task import find_task, load
from autograder.contract.verdict import FAIL, PASS
from autograder.grading.inside.intake import parse_notebook
from autograder.grading.nbgrader import task_variants
from autograder.grading.nbgrader.course import make_course
from autograder.grading.nbgrader.new_course import init_course
from autograder.grading.nbgrader.settings import CourseError, read_settings
from autograder.grading.nbgrader.submissions import find_submissions
from autograder.grading.outside.pipeline import Grader
from autograder.grading.outside.sandbox import best_level
from course.curriculum import CHAPTERS, ROOT
from solutions import async_tensor_parallel, collectives

PLACES = {"reversed": "size - 1 - {}", "next": "({} + 1)", "previous": "({} - 1)"}
SOLUTIONS = {name: (ROOT / "solutions" / f"{name}.py").read_text() for name in ("collectives", "async_tensor_parallel")}
TASKS = [(entry.name, task) for entry in CHAPTERS for task in load(entry.name).tasks if task.variants]
FULL = bool(os.environ.get("MESHCRAFT_FULL"))
RINGS = ("ring_all_gather", "ring_reduce_scatter", "ring_all_to_all")
QUICK = [*zip(RINGS, PLACES, strict=True), ("ring_gather_matmul", "reversed")]
INDEX = re.compile(r"\((index - (?:step|shift))\) % size|\b(number|owner) % size")


def sentence_of(name, variant):
    task_variant = find_task(name)[1].variant(variant)
    assert task_variant
    return task_variant.sentence


def source(name):
    match = re.search(rf"^def {name}\(.*?### END SOLUTION", SOLUTIONS[find_task(name)[0]], re.MULTILINE | re.DOTALL)
    assert match
    return match[0]


def adapted(name, variant):
    """The public solution, adapted to the variant."""
    place = PLACES[variant].format
    text = INDEX.sub(lambda match: f"({place(f'({match[1] or match[2]})')}) % size", source(name))
    own = "lax.dynamic_slice_in_dim(x, index * length, length, 0)"
    start = f"lax.dynamic_update_slice_in_dim(x, {own}, ({place('index')}) % size * length, 0)"
    return text.replace("result = x  # the chunk that a device keeps is already in its place", f"result = {start}")


def defined(*texts):
    space = {**vars(async_tensor_parallel), **vars(collectives)}
    for text in texts:
        exec(text, space)
    return space


@pytest.mark.long
@pytest.mark.parametrize(("name", "variant"), [*product((t.name for _, t in TASKS), PLACES)] if FULL else QUICK)
def test_the_public_solution_fails_a_variant_and_gets_its_sentence_and_an_adapted_one_passes(name, variant):
    sentence = sentence_of(name, variant)
    failed = check(defined()[name], variant=variant).report
    (values,) = [fact for fact in failed.functions[0].facts if fact.name == "values"]
    assert failed.functions[0].verdict == FAIL and failed.points == 0 and sentence in values.message
    passed = check(defined(adapted(name, variant))[name], variant=variant).report
    assert passed.functions[0].verdict == PASS, passed.functions[0]
    assert sentence in passed.notes[0]


def test_an_unknown_variant_is_an_error():
    with pytest.raises(LookupError, match="no variant 'other'; it has: reversed, next, previous"):
        check(collectives.ring_all_gather, variant="other")


@pytest.mark.long
@pytest.mark.parametrize("variant", PLACES if FULL else ["next"])
def test_functions_made_of_two_rings_do_not_depend_on_the_variant(variant):
    pairs = {"ring_all_reduce": RINGS[:2], "async_tp_mlp": ("ring_gather_matmul", "matmul_ring_scatter")}
    for name, rings in pairs.items():
        space = defined(*(adapted(ring, variant) for ring in rings), source(name))
        assert check(space[name]).report.passed


def test_a_secret_chooses_and_functions_that_belong_together_agree():
    drawn = [task_variants.choose(bytes([i]) * 32, "collectives") for i in range(40)]
    assert all(each["ring_all_gather"] == each["ring_reduce_scatter"] for each in drawn)
    assert {each["ring_all_to_all"] for each in drawn} == {each["ring_all_gather"] for each in drawn} == {*PLACES}
    assert (
        drawn[0] == task_variants.choose(bytes([0]) * 32, "collectives")
        and task_variants.choose(b"x" * 32, "pipeline") == {}
    )


@pytest.mark.parametrize(("chapter", "task"), TASKS, ids=lambda each: getattr(each, "name", each))
def test_every_variant_changes_what_is_right_on_the_unseen_case_and_on_a_quick_one(chapter, task):
    rng = np.random.default_rng(1)
    for variant in task.variants:
        assert re.fullmatch(r"[a-z_]+", variant.name) and len(variant.sentence) < 200
        for case in (task.unseen(rng), task.cases[0]):
            inputs = task.draw(np.random.default_rng(0), case)
            usual, other = (np.asarray(task.oracle(inputs, c)["values"]) for c in (case, variant.of(case)))
            assert usual.shape == other.shape and not np.array_equal(usual, other)


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    folder = tmp_path_factory.mktemp("varied") / "course"
    init_course(folder, chapters=["collectives"], due={}, settings={}, students=[])
    return folder


def handed_in(course, name, text):
    """The released notebook with a function filled in."""
    notebook = nbformat.read(course / "release" / "collectives" / "collectives.ipynb", as_version=4)
    for cell in notebook.cells:
        if cell.metadata.get("nbgrader", {}).get("grade_id") == name:
            cell.source = text
    return nbformat.writes(notebook)


@pytest.mark.long
def test_a_new_course_says_what_it_asks_for_and_three_places_judge_it(course, tmp_path):
    variants = task_variants.requested_by(course, "collectives")
    assert set(variants) == set(RINGS)
    name, path = "ring_all_to_all", tmp_path / "collectives.ipynb"
    sentence = sentence_of(name, variants[name])
    release = (course / "release" / "collectives" / "collectives.ipynb").read_text()
    cells = nbformat.reads(release, as_version=4).cells
    at = next(i for i, cell in enumerate(cells) if cell.get("id") == f"variant-{name}")
    assert sentence in cells[at].source and cells[at + 1].metadata.nbgrader.grade_id == name
    assert f'check({name}, variant=\\"{variants[name]}\\")' in release and "### BEGIN" not in release
    for text, verdict in ((adapted(name, variants[name]), PASS), (source(name), FAIL)):
        data = handed_in(course, name, text)
        path.write_text(data)
        live = check(defined(text)[name], variant=variants[name]).report.functions[0]
        (file,) = check_notebook(path, "collectives", [name]).functions
        with Grader("collectives", secret=b"s" * 32, level=best_level(), variants=variants) as grader:
            task = load("collectives").task(name)
            official = grader.grade_task(task, parse_notebook("n", data.encode()))
            # A submission's own claim about its variant does not count.
            lying = data.replace(f'variant=\\"{variants[name]}\\"', 'variant=\\"\\"')
            assert lying != data and grader.grade_task(task, parse_notebook("n", lying.encode())).verdict == verdict
        assert [live.verdict, file.verdict, official.verdict] == [verdict] * 3
        assert all(sentence in each.facts[0].message for each in (live, file, official) if verdict == FAIL)


def test_init_again_changes_nothing_and_a_verdict_is_filed_under_what_was_asked(course):
    before = {path: path.read_bytes() for path in course.rglob("*.ipynb")}
    init_course(course, chapters=["collectives"], due={}, settings={}, students=[])
    assert before == {path: path.read_bytes() for path in course.rglob("*.ipynb")}
    folder = course / "submitted" / "ada" / "collectives"
    folder.mkdir(parents=True)
    (folder / "collectives.ipynb").write_text("{}")
    (usual,) = find_submissions(course, "collectives")
    with pytest.raises(CourseError, match="collectives already has submissions"):
        init_course(course, chapters=["collectives"], due={}, settings={"vary": False}, students=[])
    settings = (course / "course.toml").read_text()
    (course / "course.toml").write_text(re.sub(r"variants = .*", "variants = {}", settings))
    (other,) = find_submissions(course, "collectives")
    assert usual.key != other.key
    with pytest.raises(CourseError, match=r"course.toml for none.*meshcraft init .* makes them agree"):
        task_variants.requested_by(course, "collectives")
    (course / "course.toml").write_text(re.sub('"(reversed|next|previous)"', '"sideways"', settings))
    with pytest.raises(CourseError, match="no variant 'sideways'"):
        task_variants.requested_by(course, "collectives")


@pytest.mark.long
def test_an_older_course_and_one_without_variants_keep_the_public_notebook(tmp_path):
    old, plain = tmp_path / "old", tmp_path / "plain"
    make_course(old, ["collectives"])
    (old / "course.toml").write_text('name = "old"\n')
    released = (old / "release" / "collectives" / "collectives.ipynb").read_bytes()
    init_course(old, chapters=["collectives"], due={}, settings={}, students=[])
    assert (old / "release" / "collectives" / "collectives.ipynb").read_bytes() == released
    assert task_variants.requested_by(old, "collectives") == {}
    init_course(plain, chapters=["collectives"], due={}, settings={"vary": False}, students=[])
    assert read_settings(plain).variants == {} and b"variant" not in released
    init_course(plain, chapters=["collectives"], due={}, settings={"vary": True}, students=[])
    assert set(task_variants.requested_by(plain, "collectives")) == set(RINGS)
    init_course(plain, chapters=["collectives"], due={}, settings={"vary": False}, students=[])
    sources = {(folder / "source" / "collectives" / "collectives.ipynb").read_bytes() for folder in (old, plain)}
    assert len(sources) == 1

"""Command-line behaviour: exit statuses, sentences instead of tracebacks, and no lost work."""

import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import nbformat
import pytest
from rich.console import Console
from typer.main import get_command

from autograder.cli import app
from autograder.commands.grade import grade_table
from autograder.commands.hints import read_hints
from autograder.contract.task import load
from autograder.contract.verdict import (
    FAIL,
    LIMIT_EXCEEDED,
    NEEDS_HUMAN,
    PARTIAL,
    PASS,
    Fact,
    Kind,
    Report,
    Result,
    Unit,
)
from autograder.grading.inside.intake import IntakeError
from autograder.grading.nbgrader.batch import Regrade
from course.curriculum import CHAPTERS

COMMANDS = vars(get_command(app))["commands"]


@pytest.fixture
def judge(monkeypatch):
    """A judge that returns preset verdicts in place of the real one."""
    outcome = SimpleNamespace(verdicts={"shard_params": PASS, "gather_params": FAIL}, error=None)

    def judged(path, chapter, functions, **_):
        if outcome.error:
            raise outcome.error
        names = functions or list(outcome.verdicts)
        facts = (Fact("live temporaries", Kind.MEMORY, True, 90, 120, unit=Unit.BYTES, reference=100),)
        return Report(chapter, tuple(Result(n, 1.0, 2.0, outcome.verdicts[n], facts) for n in names))

    fake = SimpleNamespace(check_notebook=judged, next_step=lambda chapter, result, following: f"Next: {following}.")
    monkeypatch.setitem(sys.modules, "autograder.check", fake)
    monkeypatch.setattr("autograder.check", fake, raising=False)
    return outcome


@pytest.mark.parametrize(
    "command", ["check", "start", "hint", "reset", "build", "grade", "status", "feedback", "export"]
)
def test_a_chapter_that_does_not_exist_is_one_clear_sentence(meshcraft, command):
    ended = meshcraft(command, "nosuchchapter")
    assert ended.status == 2 and ended.out == ""
    known = ", ".join(entry.name for entry in CHAPTERS)
    assert ended.err == f"meshcraft: there is no chapter called 'nosuchchapter'; the chapters are: {known}\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["check", "fsdp"], "`meshcraft start fsdp` makes it"),
        (["check", "fsdp", "--notebook", "none.ipynb"], "there is no notebook none.ipynb"),
        (["check", "fsdp", "--solution", "--notebook", "x.ipynb"], "give one of them"),
        (["hint", "fsdp", "nothing"], "fsdp has no function 'nothing'; its functions are: shard_params"),
        *(([name, "fsdp", "fsdp_los"], "is it fsdp_loss? Its") for name in "check hint reset profile predict".split()),
        (["grade"], "has no folder `submitted/`"),
        (["grade", "fsdp", "--course", "nowhere"], "there is no course folder"),
        (["status", "fsdp"], "has no folder `submitted/`"),
        (["feedback", "fsdp", "--zip", "."], ". is a folder; name a file in it"),
        (["similar", "fsdp", "--html", "none/page.html"], "there is no folder none; make it first"),
        (["report", "fsdp", "--html", "page.html", "--json"], "three formats; choose one"),
        (["extend", "fsdp", "ada", "--hours", "2", "--until", "2026-12-03T18:00"], "both say how long"),
    ],
)
def test_wrong_use_says_what_to_do(meshcraft, monkeypatch, arguments, sentence):
    monkeypatch.setattr("autograder.grading.outside.sandbox.best_level", lambda allow_unsafe: "bubblewrap")
    ended = meshcraft(*arguments)
    assert ended.status == 2 and sentence in ended.err and "Traceback" not in ended.err


def write_stubs_otherwise(path, *names):
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.id in names:
            cell.source += "\n    # mine"
            cell.source = cell.source.replace("raise NotImplementedError()", "return None")
    nbformat.write(notebook, path)


def test_list_shows_every_function_and_personal_bests_in_80_columns(meshcraft, judge, tmp_path):
    assert "0 of  5  ·····" in meshcraft("list").out
    meshcraft("start", "fsdp", "--no-open")
    write_stubs_otherwise(tmp_path / "fsdp" / "fsdp.ipynb", "shard_params", "gather_params", "fsdp_loss")
    meshcraft("check", "fsdp")
    shown = meshcraft("list").out
    assert "1 of  5  ✓✗○··" in shown and max(map(len, shown.splitlines())) <= 80
    assert "\nNext: gather_params." in meshcraft("list", "fsdp").out
    judge.verdicts["fsdp_loss"] = PASS
    assert "Next: gather_params." in meshcraft("check", "fsdp", "fsdp_loss").out  # the first that does not pass
    del judge.verdicts["fsdp_loss"]
    meshcraft("reset", "fsdp", "fsdp_loss", "--yes")
    write_stubs_otherwise(tmp_path / "fsdp" / "fsdp.ipynb", "fsdp_loss")
    assert "live temporaries" in meshcraft("list", "--best").out
    primer, *rows = json.loads(meshcraft("list", "--json").out)["chapters"]
    assert primer["chapter"] == "primer" and not primer["started"] and primer["judged"] == []
    assert [row["chapter"] for row in rows] == [entry.name for entry in CHAPTERS]
    (row,) = (row for row in rows if row["chapter"] == "fsdp")
    assert row["started"] and row["passed"] == ["shard_params"]
    write_stubs_otherwise(tmp_path / "fsdp" / "fsdp.ipynb", "shard_params", "gather_params")
    shown = meshcraft("list").out
    assert "0 of  5  ○○○··" in shown and "○ changed since" in shown and max(map(len, shown.splitlines())) <= 80
    assert "shard_params" in meshcraft("hint", "fsdp").out


def test_a_stub_of_an_older_release_is_not_started_for_list_as_for_check(meshcraft, judge, tmp_path):
    meshcraft("start", "fsdp", "--no-open")
    path = tmp_path / "fsdp" / "fsdp.ipynb"
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.id in ("shard_params", "gather_params"):
            cell.source = cell.source.replace('"""', '"""As an older release said: ', 1)
        if cell.id == "fsdp_loss":
            cell.source = cell.source.replace("raise", "return 0.0\n    raise")
    nbformat.write(notebook, path)
    meshcraft("check", "fsdp", "gather_params")
    (row,) = json.loads(meshcraft("list", "fsdp", "--json").out)["chapters"]
    states = {entry["function"]: entry["state"] for entry in row["functions"]}
    assert states["shard_params"] == states["gather_params"] == "not started"
    assert states["fsdp_loss"] == "not judged", "what has been written counts, though the last line was left there"


def test_list_imports_nothing_slow():
    program = (
        "import sys; from autograder import cli; sys.argv[1:] = ['list']\ntry: cli.main()\nexcept SystemExit: pass\n"
    )
    program += "assert not {'flax', 'nbgrader', 'nbformat', 'sqlalchemy', 'autograder.contract.task'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def test_start_never_overwrites(meshcraft, tmp_path):
    assert meshcraft("start", "fsdp", "--no-open").status == 0
    path = tmp_path / "fsdp" / "fsdp.ipynb"
    assert "raise NotImplementedError" in path.read_text()
    path.write_text("mine")
    assert "already exists" in meshcraft("start", "fsdp", "--no-open").out
    assert path.read_text() == "mine"


def test_the_primer_starts_and_resets_like_a_chapter_and_has_nothing_to_judge(meshcraft, tmp_path):
    assert meshcraft("start", "primer", "--no-open").status == 0
    path = tmp_path / "primer" / "primer.ipynb"
    fresh = path.read_text()
    path.write_text("mine")
    assert meshcraft("reset", "primer", "--yes").status == 0 and path.read_text() == fresh
    for command in ("check", "hint", "grade"):
        ended = meshcraft(command, "primer")
        assert ended.status == 2 and "the primer has no functions to write; `meshcraft start primer`" in ended.err


def test_check_exits_1_if_something_fell_short_and_3_if_a_person_is_needed(meshcraft, judge):
    meshcraft("start", "fsdp", "--no-open")
    assert meshcraft("check", "fsdp", "shard_params").status == 0
    ended = meshcraft("check", "fsdp", "--json")
    assert ended.status == 1
    assert [row["verdict"] for row in json.loads(ended.out)["functions"]] == [PASS, FAIL]
    judge.verdicts = {"shard_params": NEEDS_HUMAN}
    assert meshcraft("check", "fsdp").status == 3


def test_check_explains_a_notebook_that_cannot_be_read(meshcraft, judge):
    meshcraft("start", "fsdp", "--no-open")
    judge.error = IntakeError("fsdp.ipynb is not JSON")
    ended = meshcraft("check", "fsdp")
    assert ended.status == 2 and ended.err.endswith("\nmeshcraft: fsdp.ipynb is not JSON\n")
    assert ended.err.startswith("judging all functions of fsdp;")


def test_a_check_cell_that_asks_for_what_its_function_does_not_have_is_explained(meshcraft, tmp_path):
    meshcraft("start", "fsdp", "--no-open")
    path = tmp_path / "fsdp" / "fsdp.ipynb"
    path.write_text(path.read_text().replace("check(fsdp_loss)", "check(fsdp_loss, variant='other')"))
    ended = meshcraft("check", "fsdp", "fsdp_loss")
    assert ended.status == 2 and "meshcraft: fsdp_loss has no variant 'other'; it has: none." in ended.err


def test_check_names_the_functions_that_exist(meshcraft):
    meshcraft("start", "fsdp", "--no-open")
    ended = meshcraft("check", "fsdp", "nothing")
    assert ended.status == 2 and "shard_params, gather_params, fsdp_loss" in ended.err


def test_hints_come_one_by_one_and_remember_where_they_were(meshcraft):
    tiers = len(read_hints("fsdp")["gather_params"])
    heads = [meshcraft("hint", "fsdp", "gather_params").out.splitlines()[0] for _ in range(tiers + 1)]
    numbers = [*range(1, tiers + 1), tiers]
    assert heads == [f"gather_params  hint {number} of {tiers}" for number in numbers]
    assert meshcraft("hint", "fsdp", "gather_params", "--all").out.count("gather_params  hint ") == tiers
    assert meshcraft("hint", "fsdp", "gather_params", "2").out.startswith("gather_params  hint 2 of")
    assert "you have seen 0" in meshcraft("hint", "fsdp", "fsdp_loss", "2").err
    assert "`jax.custom_vjp`" in meshcraft("hint", "fsdp", "gather_params", "4").out


def test_hint_without_a_function_takes_the_first_that_does_not_pass(meshcraft, judge):
    meshcraft("start", "fsdp", "--no-open")
    meshcraft("check", "fsdp")
    assert meshcraft("hint", "fsdp").out.startswith("gather_params  hint 1 of")
    judge.verdicts = dict.fromkeys(read_hints("fsdp"), PASS)
    meshcraft("check", "fsdp")
    assert "all functions of fsdp pass" in meshcraft("hint", "fsdp").out


@pytest.mark.parametrize("chapter", [entry.name for entry in CHAPTERS])
def test_every_function_has_three_hints_or_four(chapter):
    hints = read_hints(chapter)
    assert list(hints) == [task.name for task in load(chapter).tasks]
    assert all(3 <= len(tiers) <= 4 for tiers in hints.values())


def test_reset_asks_and_keeps_a_copy(meshcraft, monkeypatch, tmp_path):
    meshcraft("start", "fsdp", "--no-open")
    path = tmp_path / "fsdp" / "fsdp.ipynb"
    fresh = path.read_text()
    path.write_text("mine")
    for answer, status, text in (("n", 1, "mine"), ("y", 0, fresh)):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{answer}\n"))
        assert meshcraft("reset", "fsdp").status == status and path.read_text() == text
    (backup,) = (tmp_path / "fsdp" / ".meshcraft" / "backups").iterdir()
    assert backup.read_text() == "mine"


def test_reset_of_one_function_leaves_the_others_and_forgets_its_progress_and_hints(meshcraft, judge, tmp_path):
    meshcraft("start", "fsdp", "--no-open")
    path = tmp_path / "fsdp" / "fsdp.ipynb"
    write_stubs_otherwise(path, "shard_params", "gather_params")
    meshcraft("check", "fsdp")
    meshcraft("hint", "fsdp", "shard_params")
    assert meshcraft("reset", "fsdp", "shard_params", "--yes").status == 0
    first = json.loads(meshcraft("list", "fsdp", "--json").out)["chapters"][0]["functions"][0]
    assert (first["state"], first["hints"]) == ("not started", 0)
    sources = {cell.id: cell.source for cell in nbformat.read(path, as_version=4).cells}
    assert "# mine" not in sources["shard_params"] and "# mine" in sources["gather_params"]


def test_grade_exits_3_if_a_submission_needs_a_person_and_0_if_all_have_a_verdict(meshcraft, monkeypatch, tmp_path):
    (tmp_path / "submitted" / "ada" / "fsdp").mkdir(parents=True)
    outcome = SimpleNamespace(verdict=FAIL, before=None, after=None)

    def grade_course(course, name, *, level, on_again, **_):
        if outcome.before:
            on_again(Regrade("ada", outcome.before, outcome.after))
        return [Report(name, (Result("f", 0.0, 1.0, outcome.verdict, message="why"),), "ada", level)]

    monkeypatch.setattr("autograder.grading.nbgrader.batch.grade_course", grade_course)
    monkeypatch.setattr("autograder.grading.outside.sandbox.best_level", lambda allow_unsafe: "bubblewrap")
    ended = meshcraft("grade", "--json")
    assert ended.status == 0
    (row,) = json.loads(ended.out)["submissions"]
    assert (row["student"], row["isolation"], row["functions"][0]["verdict"]) == ("ada", "bubblewrap", FAIL)
    outcome.verdict = NEEDS_HUMAN
    ended = meshcraft("grade")
    assert ended.status == 3 and "ada needs a person: why" in ended.err
    outcome.verdict, outcome.before, outcome.after = (
        FAIL,
        Report("fsdp", (), "ada"),
        Report("fsdp", (), "ada", "landlock", notes=("more",)),
    )
    ended = meshcraft("grade", "--again")
    assert ended.status == 3 and "ada came out differently: other notes" in ended.err
    assert "0 of 1 graded again" in ended.out
    outcome.before = replace(outcome.after, isolation="bubblewrap")
    ended = meshcraft("grade", "--again", "--json")
    assert ended.status == 0 and json.loads(ended.out)["again"][0]["same"]
    assert "only for this machine" in meshcraft("grade", "--scheduler", "tcp://x:1", "--unsafe-local").err


def test_grade_table_fits_80_columns_and_says_the_isolation_once():
    names, verdicts = ("shard_params", "gather_params", "fsdp_loss"), (PARTIAL, LIMIT_EXCEEDED, NEEDS_HUMAN)
    results = tuple(Result(name, 2.14, 5, verdict) for name, verdict in zip(names, verdicts, strict=True))
    reports = [Report("fsdp", results, student, "bubblewrap") for student in ("different", "replicated")]
    console = Console(file=io.StringIO(), width=80)
    console.print(grade_table(reports))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert [part for part in (*names, "2.14 partial", "2.14 limit", "2.14 person") if part not in shown] == []
    assert shown.count("bubblewrap") == 1
    console.print(grade_table([*reports, Report("fsdp", results, "ada", "landlock")]))
    assert "landlock" in console.file.getvalue()  # type: ignore[attr-defined]


def test_grade_table_of_many_functions_names_those_that_did_not_pass_unbroken():
    names = [f"ring_all_gather_{i}" for i in range(12)]
    results = tuple(Result(name, 1, 2, PASS if i else FAIL) for i, name in enumerate(names))
    console = Console(file=io.StringIO(), width=80)
    console.print(grade_table([Report("collectives", results, "ada", "bubblewrap")]))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "ring_all_gather_0\N{NO-BREAK SPACE}1\N{NO-BREAK SPACE}fail" in shown and "12 of 24" in shown
    assert "ring_all_gather_1\N{NO-BREAK SPACE}" not in shown


def test_doctor_names_what_is_missing(meshcraft, monkeypatch):
    backend = SimpleNamespace(name="bubblewrap", available=False, reason="bwrap is not installed", remedy="Install it")
    monkeypatch.setattr("autograder.grading.outside.sandbox.survey", lambda: [backend])
    ended = meshcraft("doctor")
    assert ended.status == 1 and "bwrap is not installed. Install it" in ended.out
    assert json.loads(meshcraft("doctor", "--json").out)["sandbox"] is None


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_is_whole_on_a_narrow_terminal(monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    context = COMMANDS[command].make_context(command, [], resilient_parsing=True)
    shown = COMMANDS[command].get_help(context)
    plain = " ".join(re.sub("[│╭╮╰╯─]", " ", shown).split())
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80
    for parameter in COMMANDS[command].get_params(context):
        names, meaning = parameter.get_help_record(context)
        assert meaning, f"{names} is not explained"
        # A name stands beside the first line of its meaning, so compare word by word.
        words = {*re.sub(r" / | <list.*", " ", names.replace(" range", "")).split(), *meaning.split()}
        assert words - {*plain.split()} <= {"<str>", "<int>", "<path>"}
    assert " ".join(COMMANDS[command].help.split()) in plain


def stated_defaults(command):
    """The figures that a command's help gives as ``N by default``, by their names in the course's dataclasses."""
    names = {"experts": "num_experts", "experts_per_token": "k"}
    names |= {"layers": "num_layers", "heads": "num_heads"} if command == "train" else {}
    context = COMMANDS[command].make_context(command, [], resilient_parsing=True)
    texts = {p.name: p.get_help_record(context)[1] for p in COMMANDS[command].get_params(context)}
    figures = {name: re.search(r"([\d.,]+) by default", text) for name, text in texts.items()}
    return {names.get(name, name): float(each[1].replace(",", "")) for name, each in figures.items() if each}


def test_defaults_in_the_help_are_those_that_are_used():
    from course.planning.models import BILLION
    from course.training.loop import Run
    from course.training.strategy import MixtureSizes

    run = Run(MixtureSizes())
    for command, number, used in (
        ("train", 15, {**vars(run), **vars(run.sizes), **vars(run.schedule)}),
        ("plan", 5, vars(BILLION)),
    ):
        stated = stated_defaults(command)
        assert len(stated) == number and stated.items() <= used.items()

"""Many attacks once, in the best sandbox of this machine, a few through stock nbgrader, and the runner itself."""

import json
import os
import re
import signal
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from autograder.contract.task import load
from autograder.grading.outside.judge import expected, plan
from autograder.grading.outside.sandbox import best_level
from autograder.proof.attacks import __main__
from autograder.proof.attacks.canaries import IN_VARIABLE, NEIGHBOURS, SECRET, search
from autograder.proof.attacks.declared import CELLS, GROUPS, AttackError, read_attacks, read_notebook
from autograder.proof.attacks.fixtures import find_attacks
from autograder.proof.attacks.stock import run_stock
from autograder.proof.attacks.submissions import SUBMISSIONS
from autograder.proof.attacks.suite import Outcome, Row, run_suite, watched, workplace
from autograder.release.notebook import exercise_text

pytestmark = pytest.mark.long
FULL = bool(os.environ.get("MESHCRAFT_FULL"))

# They wait for a limit, or work at the realistic size.
SLOW = """
    absurd_loop_in_program averages_what_it_keeps compile_bomb endless_loop endless_loop_ignoring_signals
    endless_message gathers_a_few_rows pads_by_less_than_nothing pools_what_it_keeps repeats_what_it_keeps
    rounds_where_nobody_runs_it selects_by_an_identity is_cheap_where_nobody_runs_it
    keeps_a_corner_where_nobody_runs_it knows_when_it_is_only_looked_at long_loop_in_program million_operations sleeps
    scans_halves_by_depth scans_pairs_and_pads unrolls_and_pads_the_few unrolls_behind_a_branch
""".split()
# The tests of the demo run an attack that forges points through stock nbgrader.
CONTROLS = ("reads_other_submissions",)
HEADER = '{verdict = "fail", group = "reads", control = true}'
GOOD = f"# %% attack tries {HEADER}\n# Tries something. Nothing happens.\nx = 1\n"


def test_every_section_of_every_file_is_read():
    attacks = find_attacks()
    lines = [line for file in CELLS.iterdir() for line in file.read_text().splitlines() if "# %%" in line]
    assert all(re.match("# %% (attack|helper|defaults)( |$)", line) for line in lines)
    assert len(attacks) == sum(" attack " in line for line in lines) + len(SUBMISSIONS) >= 200
    assert {attack.group for attack in attacks} == set(GROUPS)


def test_a_notebook_is_made_of_helpers_new_cells_and_answers(tmp_path):
    """Functions of the chapter replace stubs, whichever section they come from; everything else precedes the first."""
    header = '{uses = ["before"], then = "after"}'
    file = tmp_path / "some.py"
    file.write_text(
        "# %% defaults\n# verdict = 'refused'\n# group = 'forges'\n# control = 'why not'\n"
        + f"# %% attack one {header}\n# Says\n# this.\nx = 1\ndef gather_params():\n    return x\ny = 2\n"
        + "# %% helper before\n# For readers.\nz = 3\n# %% helper after\ndef shard_params():\n    pass\n"
    )
    (attack,) = read_attacks(tmp_path)
    assert (attack.says, attack.control) == ("Says this.", "why not")
    assert set(attack.functions) == {"gather_params", "shard_params"}
    released = tmp_path / "released" / "fsdp.ipynb"
    released.parent.mkdir()
    released.write_text(exercise_text("fsdp"))
    attack.submit(tmp_path, released)
    notebook, cells = read_notebook(tmp_path / "fsdp.ipynb")
    sources = [cell["source"] for cell in notebook["cells"]]
    assert cells["gather_params"]["source"] == "def gather_params():\n    return x"
    assert cells["shard_params"]["source"] == "def shard_params():\n    pass"
    new = sources.index("z = 3")
    assert sources[new + 1] == "x = 1\ny = 2" and new + 1 < sources.index(cells["shard_params"]["source"])


def short_form():
    """A few fast attacks of every group; `make attacks` runs them all."""
    attacks = [attack for attack in find_attacks() if attack.name not in SLOW]
    return [attack for group in GROUPS for attack in [a for a in attacks if a.group == group][:: 5 if FULL else 10]]


def test_every_attack_gets_the_verdict_that_it_must():
    attacks = short_form()
    assert {attack.group for attack in attacks} == set(GROUPS)
    outcome = run_suite(attacks, best_level())
    assert len(outcome.rows) == len(attacks)
    assert [
        (row.name, row.found, row.points, row.canaries, row.problem) for row in outcome.rows if not row.withstood
    ] == []
    assert outcome.left == ()


@pytest.mark.skipif(not FULL, reason="the demo's tests try another: in `make test-full`")
def test_stock_nbgrader_lets_them_through():
    attacks = [attack for attack in find_attacks() if attack.name in CONTROLS]
    with workplace() as folder:
        controls = run_stock(attacks, {}, folder)
    assert [control.name for control in controls if control.let_through] == list(CONTROLS)
    assert controls[0].canaries == ("another student's notebook",)


def test_search_finds_every_canary():
    attack = next(attack for attack in find_attacks() if attack.functions == ("shard_params",))
    released = exercise_text("fsdp")
    task = load("fsdp").task("shard_params")
    planned = plan("fsdp", task, secret=SECRET, submission="abc")
    inputs, _ = expected(planned, planned.cases[-1])
    values = " ".join(str(value) for value in max(inputs.values(), key=np.size).ravel()[:20])

    def canaries_in(text, submission=b"{}"):
        return search(text, attack, submission, "abc", released)

    assert canaries_in("nothing but an error: 0.12345 and 1.23456") == []
    assert canaries_in(f"<pre>{SECRET.hex()}</pre>") == ["the course's secret"]
    assert canaries_in(f"I found {NEIGHBOURS}") == ["another student's notebook"]
    assert canaries_in("b'SQLite format 3'") == ["a database"]
    assert canaries_in(IN_VARIABLE) == ["the environment"]
    assert canaries_in(f"seed={planned.seed}") == ["the seed of the official inputs"]
    assert canaries_in(values) == ["the official inputs"]
    line = "shards, specs = zip(*map(split, leaves), strict=True)"
    assert canaries_in(f"&quot;{line}&quot;") == ["the solution"]
    assert canaries_in(line, json.dumps({"cells": [{"source": line}]}).encode()) == [], (
        "what was handed in does not count"
    )


def test_what_is_left_running_is_noticed():
    with watched() as left:
        start = "import subprocess; print(subprocess.Popen(['sleep', '60'], start_new_session=True, stdout=2).pid)"
        sleeper = int(subprocess.check_output([sys.executable, "-c", start]))
    assert len(left) == 1 and "sleep 60" in left[0]
    os.kill(sleeper, signal.SIGKILL)
    os.waitpid(sleeper, 0)


ROW = Row("name", "reads", "", "refused", "refused", 0.0, None, (), (), 0.0, ())


def test_what_was_left_behind_is_kept_until_every_attack_that_may_have_left_it_is_rerun(tmp_path, monkeypatch):
    monkeypatch.setattr(__main__, "RESULTS", tmp_path / "results.json")

    def kept(names, left=(), whole=False):
        rows = tuple(msgspec.structs.replace(ROW, name=name) for name in names)
        __main__.keep(Outcome(rows, left), [], "here", whole)
        (run,) = json.loads(__main__.RESULTS.read_text())["runs"].values()
        return len(run["rows"]), [(old["what"], old["attacks"]) for old in run["left"]]

    assert kept(("forks", "writes"), ("a file", "a process"), whole=True) == (
        2,
        [("a file", ["forks", "writes"]), ("a process", ["forks", "writes"])],
    )
    assert kept(("forks",), ("a process",)) == (
        2,
        [("a file", ["writes"]), ("a process", ["writes"]), ("a process", ["forks"])],
    )
    assert kept(("writes",)) == (2, [("a process", ["forks"])])
    assert kept(("forks",)) == (2, [])


@pytest.mark.parametrize(
    "changes", [{"found": "pass"}, {"canaries": ("the solution",)}, {"problem": "no page"}, {"expected_points": 1.0}]
)
def test_row_does_not_hold(changes):
    assert ROW.withstood
    assert not msgspec.structs.replace(ROW, **changes).withstood


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"fail"', '"mostly_fine"', "is not a verdict"),
        (", control = true", "", "missing required field `control`"),
        ("true", "false", "control is true, or why"),
        ("reads", "steals", "a group: reads"),
        ("control", "colour = 1, control", "unknown field `colour`"),
        ("control", 'functions = ["other"], control', "no function other"),
        ("control", 'chapter = "other", control', "no chapter called .other"),
        ("control", 'uses = ["other"], control', "other"),
        ("control", "points = 1.0, control", "if, and only if, its verdict is partial"),
        ("# Tries something. Nothing happens.\n", "", "says what it tries"),
        ("true}", "true", "some.py, tries"),
        ("x = 1", "x =", "some.py, tries"),
    ],
)
def test_malformed_attack_is_named(tmp_path, old, new, message):
    assert old in GOOD
    (tmp_path / "some.py").write_text(GOOD.replace(old, new, 1))
    with pytest.raises(AttackError, match=message):
        list(read_attacks(tmp_path))


def test_two_attacks_of_one_name_are_refused(tmp_path):
    (tmp_path / "some.py").write_text(GOOD + GOOD)
    with pytest.raises(AttackError, match="same name: tries"):
        find_attacks(tmp_path)

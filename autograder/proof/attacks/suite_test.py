"""Many attacks once, in the best sandbox of this machine, a few through stock nbgrader, and the runner itself."""

import dataclasses
import json
import os
import signal
import subprocess
import sys

import pytest

from autograder.contract.task import load
from autograder.grading.outside.judge import expected, plan
from autograder.grading.outside.sandbox import best_level
from autograder.proof.attacks.canaries import IN_VARIABLE, NEIGHBOURS, SECRET, search
from autograder.proof.attacks.fixtures import GROUPS, HERE, FixtureError, find_attacks
from autograder.proof.attacks.stock import run_stock
from autograder.proof.attacks.suite import Row, run_suite, watched, workplace
from autograder.release.notebook import exercise_text

# They wait for a limit, or work at the realistic size.
SLOW = (
    "absurd_loop_in_program", "averages_what_it_keeps", "compile_bomb", "endless_loop",
    "endless_loop_ignoring_signals", "endless_message", "gathers_a_few_rows", "pads_by_less_than_nothing",
    "pools_what_it_keeps", "repeats_what_it_keeps", "rounds_where_nobody_runs_it", "selects_by_an_identity",
    "is_cheap_where_nobody_runs_it", "keeps_a_corner_where_nobody_runs_it", "knows_when_it_is_only_looked_at",
    "long_loop_in_program", "million_operations", "sleeps", "scans_halves_by_depth", "scans_pairs_and_pads",
    "unrolls_and_pads_the_few", "unrolls_behind_a_branch",
)  # fmt: skip
# One that forges points is handed to stock nbgrader by the tests of the demo.
CONTROLS = ("reads_other_submissions",)
GOOD = '"""Tries something. Nothing happens.\n\ngroup: reads\ncontrol: yes\n"""\n\n# %% [shard_params]\nx = 1\n'


def test_every_file_of_a_fixture_is_seen():
    attacks = find_attacks()
    files = {path for path in HERE.rglob("*.py") if path.name in ("attack.py", "submit.py")}
    assert {attack.file for attack in attacks} == files
    assert len(attacks) >= 60
    assert {attack.group for attack in attacks} == {"reads", "forges", "tampers", "exhausts", "reaches"}


def short_form():
    """Every fifth of those that are not slow, from all groups; `make attacks` runs them all."""
    attacks = [attack for attack in find_attacks() if attack.name not in SLOW]
    return attacks[::5]


def test_every_attack_gets_the_verdict_of_its_folder():
    attacks = short_form()
    assert len(attacks) >= 30 and {attack.group for attack in attacks} == set(GROUPS)
    outcome = run_suite(attacks, best_level())
    assert len(outcome.rows) == len(attacks)
    assert [(row.name, row.found, row.points, row.canaries, row.problem) for row in outcome.rows if not row.held] == []
    assert outcome.left == ()


def test_stock_nbgrader_lets_them_through():
    attacks = [attack for attack in find_attacks() if attack.name in CONTROLS]
    with workplace() as folder:
        found = run_stock(attacks, {}, folder)
    assert [control.name for control in found if control.let_through] == list(CONTROLS)
    assert found[0].canaries == ("another student's notebook",)


def test_search_finds_every_canary():
    attack = next(attack for attack in find_attacks() if attack.functions == ("shard_params",))
    released = exercise_text("fsdp")
    task = load("fsdp").task("shard_params")
    planned = plan("fsdp", task, secret=SECRET, submission="abc")
    inputs, _ = expected(planned, planned.cases[-1])
    values = " ".join(str(value) for value in inputs["params/first/kernel"].ravel()[:20])

    def found(text, submission=b"{}"):
        return search(text, attack, submission, "abc", released)

    assert found("nothing but an error: 0.12345 and 1.23456") == []
    assert found(f"<pre>{SECRET.hex()}</pre>") == ["the course's secret"]
    assert found(f"I found {NEIGHBOURS}") == ["another student's notebook"]
    assert found("b'SQLite format 3'") == ["a database"]
    assert found(IN_VARIABLE) == ["the environment"]
    assert found(f"seed={planned.seed}") == ["the seed of the official inputs"]
    assert found(values) == ["the official inputs"]
    line = "shards, specs = zip(*map(split, leaves), strict=True)"
    assert found(f"&quot;{line}&quot;") == ["the solution"]
    assert found(line, json.dumps({"cells": [{"source": line}]}).encode()) == [], "what was handed in is no find"


def test_what_is_left_running_is_noticed():
    with watched() as left:
        start = "import subprocess; print(subprocess.Popen(['sleep', '60'], start_new_session=True, stdout=2).pid)"
        sleeper = int(subprocess.check_output([sys.executable, "-c", start]))
    assert len(left) == 1 and "sleep 60" in left[0]
    os.kill(sleeper, signal.SIGKILL)
    os.waitpid(sleeper, 0)


ROW = Row("name", "reads", "", "refused", "refused", 0.0, None, (), (), 0.0, ())


@pytest.mark.parametrize(
    "changes",
    [{"found": "pass"}, {"canaries": ("the solution",)}, {"problem": "no page"}, {"expected_points": 1.0}],
)
def test_row_does_not_hold(changes):
    assert ROW.held
    assert not dataclasses.replace(ROW, **changes).held


@pytest.mark.parametrize(
    ("where", "text", "said"),
    [
        ("mostly_fine/x/attack.py", GOOD, "not the name of a verdict"),
        ("fail/x/attack.txt", GOOD, "holds 0 of them"),
        ("fail/x/attack.py", GOOD.replace("control: yes\n", ""), "and a control"),
        ("fail/x/attack.py", GOOD.replace("reads", "steals"), "a group"),
        ("fail/x/attack.py", GOOD.replace("control: yes", "control: no"), "expected 'yes' or 'no: why'"),
        ("fail/x/attack.py", GOOD.replace("control", "colour: red\ncontrol"), "is not a header line"),
        ("fail/x/attack.py", GOOD.replace("control", "functions: other\ncontrol"), "no function other"),
        ("fail/x/attack.py", GOOD.replace("control", "chapter: other\ncontrol"), "no chapter other"),
        ("partial/x/attack.py", GOOD, "if, and only if, its verdict is partial"),
    ],
)
def test_malformed_fixture_is_named(tmp_path, where, text, said):
    path = tmp_path / where
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(FixtureError, match=said):
        find_attacks(tmp_path)


def test_two_fixtures_of_one_name_are_refused(tmp_path):
    for verdict in ("fail", "refused"):
        path = tmp_path / verdict / "same" / "attack.py"
        path.parent.mkdir(parents=True)
        path.write_text(GOOD)
    with pytest.raises(FixtureError, match="same name: same"):
        find_attacks(tmp_path)

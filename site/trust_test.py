"""The page on trust shows the kept results of the attacks; ``python site/trust_test.py`` rewrites its tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import pytest

from autograder.proof.attacks.declared import GROUPS
from autograder.proof.attacks.fixtures import find_attacks
from autograder.proof.attacks.stock import Control
from course.render.page_parts import generated, write_parts

PAGE = Path(__file__).parent / "pages" / "trust.md"
RESULTS = Path(__file__).parents[1] / "autograder" / "proof" / "attacks" / "results.json"
SOAK = Path(__file__).parents[1] / "autograder" / "proof" / "soak.json"
FUZZ = Path(__file__).parents[1] / "autograder" / "proof" / "attacks" / "fuzz.json"
# The stage at which a mutation ended, in the fuzzer's terms.
ENDS = {
    "wire": "read as no message",
    "header": "refused by its header",
    "audit or lens": "refused by the audit, or could not be counted",
    "compiler": "refused by the compiler",
    "run": "failed when it ran",
    "executor": "ended the process that runs Programs",
    "judged": "judged by its values",
    "fault": "the grader failed",
    "grader": "the grader raised",
}
# The soak's names of the processes that it kills.
KINDS = {
    "worker": "a worker",
    "grader": "the grader itself",
    "sandbox": "a sandbox's outermost process",
    "tracer": "the process that submissions' processes are forked from",
    "submission": "a submission's own process",
    "executor": "the process that runs Programs",
    "other": "another: a trial of the sandbox, a step of its start",
}
BACKENDS, USERS = ("bubblewrap", "landlock"), ("root", "a plain user")
PACKAGES = ("python", "jax", "numpy")
AGAIN = "run: python -m autograder.proof.attacks --write (each backend, as root and as a user, once with --stock)"


def kept():
    return json.loads(RESULTS.read_text())


def controls():
    return {control.name: control for control in msgspec.convert(kept()["controls"], list[Control])}


def runs() -> str:
    """Every recorded run: its location and versions, and the number of attacks withstood."""
    head = ["| sandbox | started by | attacks | verdict as it must be | canaries seen | left behind |"]
    rows = []
    for where, run in kept()["runs"].items():
        backend, _, user = where.partition(", ")
        right = sum(row["found"] == row["expected"] for row in run["rows"])
        seen = sum(len(row["canaries"]) for row in run["rows"])
        rows.append(f"| {backend} | {user} | {len(run['rows'])} | {right} | {seen} | {len(run['left'])} |")
    versions = {tuple(run["versions"][name] for name in PACKAGES) for run in kept()["runs"].values()}
    packages = "; ".join(
        ", ".join(f"{n} {v}" for n, v in zip(PACKAGES, found, strict=True)) for found in sorted(versions)
    )
    return "\n".join([*head, "|---|---|---:|---:|---:|---:|", *rows, "", f"With {packages}."])


def control() -> str:
    """The number of attacks that stock nbgrader lets through, by group."""
    groups = {attack.name: attack.group for attack in find_attacks()}
    tried = controls()
    rows = []
    for group, title in GROUPS.items():
        those = [found for name, found in tried.items() if groups.get(name) == group]
        rows.append(f"| {title} | {len(those)} | {sum(found.let_through for found in those)} |")
    through = sum(found.let_through for found in tried.values())
    summary = f"Of {len(tried)} attacks that apply to it, stock nbgrader lets {through} through."
    return "\n".join([summary, "", "| group | tried on stock nbgrader | let through |", "|---|---:|---:|", *rows])


def attacks() -> str:
    """Every attack: its goal, its verdict, and the outcome with stock nbgrader."""
    tried = controls()
    found = find_attacks()
    parts = []
    for group, title in GROUPS.items():
        those = [attack for attack in found if attack.group == group]
        parts += [f"### {title[0].upper()}{title[1:]}", "", "| attack | verdict | stock nbgrader |", "|---|---|---|"]
        for attack in those:
            said = "" if attack.name not in tried else "let through" if tried[attack.name].let_through else "stopped"
            parts.append(
                f"| **{attack.name.replace('_', ' ')}**: {_plain(attack.says)} | `{attack.verdict}` | {said} |"
            )
        parts.append("")
    return "\n".join(parts).strip()


def _plain(text: str) -> str:
    for mark in "\\|*_`[]<>":
        text = text.replace(mark, f"\\{mark}" if mark not in "<>" else {"<": "&lt;", ">": "&gt;"}[mark])
    return text


def faults() -> str:
    """The counts of the recorded soak."""
    found = json.loads(SOAK.read_text())
    by_kind = sorted(found["kills"].items(), key=lambda entry: -entry[1])
    head = f"{found['submissions']} submissions, {sum(found['kills'].values())} processes killed, the grader started"
    head += f" {found['runs'] + 1} times; with Python {found['python']} and jax {found['jax']}."
    rows = [f"| {KINDS[kind]} | {count} |" for kind, count in by_kind]
    ends = [f"| {what} | {len(found[what])} |" for what in ("lost", "doubled", "different", "left")]
    return "\n".join(
        [head, "", "| killed | times |", "|---|---:|", *rows, "", "| afterwards | submissions |", "|---|---:|", *ends]
    )


def mutations() -> str:
    """The outcomes of the recorded campaign's mutations."""
    found = json.loads(FUZZ.read_text())
    head = f"{found['mutations']:,} mutations, seed {found['seed']}; "
    head += f"with Python {found['python']} and jax {found['jax']}."
    layers = list(found["stages"])
    ends = [end for end in ENDS if any(found["stages"][layer].get(end) for layer in layers)]
    rows = []
    for end in ends:
        counts = [found["stages"][layer].get(end, 0) for layer in layers]
        rows.append(f"| {ENDS[end]} | {' | '.join(f'{count:,}' for count in counts)} | {sum(counts):,} |")
    summary = f"Crashes of the grader, and unearned points: {len(found['failures'])}."
    titles, line = " | ".join(layers), "---:|" * (len(layers) + 1)
    return "\n".join([head, "", f"| outcome | {titles} | all |", f"|---|{line}", *rows, "", summary])


BLOCKS = {"runs": runs, "control": control, "attacks": attacks, "mutations": mutations, "faults": faults}


def write() -> None:
    """Write the recorded results into the page."""
    write_parts(PAGE, {name: make() for name, make in BLOCKS.items()})


@pytest.mark.parametrize("name", BLOCKS)
def test_generated_part_is_what_was_kept(name):
    assert generated(PAGE, name) == BLOCKS[name](), "run: python site/trust_test.py"


def test_nothing_was_lost_doubled_different_or_left_in_the_kept_soak():
    found = json.loads(SOAK.read_text())
    assert found["submissions"] >= 200 and sum(found["kills"].values()) >= 300, "run: make soak ARGS=--write"
    assert [found[what] for what in ("lost", "doubled", "different", "left")] == [[]] * 4


def test_no_mutation_crashed_the_grader_or_earned_a_point_in_the_kept_campaign():
    found = json.loads(FUZZ.read_text())
    assert found["mutations"] >= 10_000, "run: make fuzz ARGS=--write"
    assert found["failures"] == [] and sum(found["verdicts"].values()) == found["mutations"]


def test_every_backend_was_run_as_root_and_as_a_plain_user():
    assert sorted(kept()["runs"]) == sorted(f"{backend}, {user}" for backend in BACKENDS for user in USERS), AGAIN


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("user", USERS)
def test_kept_run_has_every_attack_that_the_backend_claims_to_stop(backend, user):
    run = kept()["runs"][f"{backend}, {user}"]
    claimed = [attack for attack in find_attacks() if not attack.backends or backend in attack.backends]
    assert {row["name"]: row["expected"] for row in run["rows"]} == {a.name: a.verdict for a in claimed}, AGAIN
    short = [row for row in run["rows"] if row["found"] != row["expected"] or row["canaries"]]
    assert [row["name"] for row in short] == [] and run["left"] == []


def test_control_was_tried_on_every_attack_that_says_so():
    assert sorted(controls()) == sorted(attack.name for attack in find_attacks() if attack.control is True), AGAIN


if __name__ == "__main__":
    sys.exit(write())

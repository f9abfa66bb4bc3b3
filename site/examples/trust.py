"""The recorded attacks on the grader and on stock nbgrader, the recorded mutations and faults, and sizes never run."""

import json
from dataclasses import asdict
from pathlib import Path

import msgspec
from showing import Table, example, say

from autograder.contract.task import load
from autograder.proof.attacks.declared import GROUPS
from autograder.proof.attacks.fixtures import find_attacks
from autograder.proof.attacks.stock import Control
from course.curriculum import CHAPTERS

PROOF = Path(__file__).parents[2] / "autograder" / "proof"
RESULTS, FUZZ, SOAK = (PROOF / name for name in ("attacks/results.json", "attacks/fuzz.json", "soak.json"))
# The stage at which a mutation ended, in the fuzzer's terms.
ENDS = {
    "wire": "not readable as a message",
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
    "other": "another: a test of the sandbox, a step of its startup",
}
PACKAGES = ("python", "jax", "numpy")
LEFT_BEHIND = ("lost", "doubled", "different", "left")


def kept():
    return json.loads(RESULTS.read_text())


def controls():
    return {control.name: control for control in msgspec.convert(kept()["controls"], list[Control])}


@example("measured")
def runs() -> Table:
    """Every recorded run, and the number of attacks withstood."""
    table = Table(("sandbox", "started by"), "attacks d", "expected verdict d", "canaries seen d", "left behind d")
    for where, run in kept()["runs"].items():
        backend, _, user = where.partition(", ")
        right = sum(row["found"] == row["expected"] for row in run["rows"])
        table.add(
            (backend, user), len(run["rows"]), right, sum(len(row["canaries"]) for row in run["rows"]), len(run["left"])
        )
    versions = {tuple(run["versions"][name] for name in PACKAGES) for run in kept()["runs"].values()}
    packages = (", ".join(f"{n} {v}" for n, v in zip(PACKAGES, values, strict=True)) for values in sorted(versions))
    say(packages="; ".join(packages))
    return table


@example("measured")
def control() -> Table:
    """The number of attacks that stock nbgrader lets through, by group."""
    groups, tried = {attack.name: attack.group for attack in find_attacks()}, controls()
    table = Table("group", "tried on stock nbgrader d", "let through d")
    for group, title in GROUPS.items():
        outcomes = [outcome for name, outcome in tried.items() if groups.get(name) == group]
        table.add(title, len(outcomes), sum(outcome.let_through for outcome in outcomes))
    say(tried=len(tried), through=sum(outcome.let_through for outcome in tried.values()))
    return table


@example("measured")
def attacks() -> str:
    """Every attack: its goal, its verdict, and the outcome with stock nbgrader."""
    tried, parts = controls(), []
    for group, title in GROUPS.items():
        parts += [f"### {title[0].upper()}{title[1:]}", "", "| attack | verdict | stock nbgrader |", "|---|---|---|"]
        for attack in (attack for attack in find_attacks() if attack.group == group):
            outcome = "" if attack.name not in tried else "let through" if tried[attack.name].let_through else "stopped"
            parts.append(
                f"| **{attack.name.replace('_', ' ')}**: {plain(attack.says)} | `{attack.verdict}` | {outcome} |"
            )
        parts.append("")
    return "\n".join(parts).strip()


def plain(text: str) -> str:
    """Text that Markdown shows as it is."""
    for mark in "\\|*_`[]<>":
        text = text.replace(mark, f"\\{mark}" if mark not in "<>" else {"<": "&lt;", ">": "&gt;"}[mark])
    return text


@example("measured")
def mutations() -> Table:
    """The outcomes of the recorded campaign's mutations."""
    campaign = json.loads(FUZZ.read_text())
    layers = list(campaign["stages"])
    table = Table("outcome", *(f"{layer} ,d" for layer in layers), "all ,d")
    for end in ENDS:
        counts = [campaign["stages"][layer].get(end, 0) for layer in layers]
        if any(counts):
            table.add(ENDS[end], *counts, sum(counts))
    say(mutated=f"{campaign['mutations']:,}", seed=campaign["seed"], failures=len(campaign["failures"]))
    say(fuzzed=f"Python {campaign['python']} and jax {campaign['jax']}")
    return table


@example("measured")
def faults() -> dict[str, Table]:
    """The counts of the recorded soak."""
    soak = json.loads(SOAK.read_text())
    killed, afterwards = Table("killed", "times d"), Table("afterwards", "submissions d")
    for kind, count in sorted(soak["kills"].items(), key=lambda entry: -entry[1]):
        killed.add(KINDS[kind], count)
    for state in LEFT_BEHIND:
        afterwards.add(state, len(soak[state]))
    say(submissions=soak["submissions"], kills=sum(soak["kills"].values()), starts=soak["runs"] + 1)
    say(soaked=f"Python {soak['python']} and jax {soak['jax']}")
    return {"killed": killed, "afterwards": afterwards}


@example("counted by closed form")
def analysed() -> Table:
    """Sizes of the realistic case that no case which is run reaches, by function."""
    table = Table(("chapter", "function", "largest size that is run, of the realistic one"))
    for chapter in CHAPTERS:
        for task in load(chapter.name).tasks:
            if task.at_scale is None:
                continue
            run = [asdict(case.sizes) for case in (*task.cases, *task.stretched())]
            sizes = {name: size for name, size in asdict(task.at_scale[0].sizes).items() if type(size) is int}
            most = {name: max(sizes_run[name] for sizes_run in run) for name in sizes}
            below = [f"{name} {most[name]:,} of {size:,}" for name, size in sizes.items() if most[name] < size]
            if below:
                table.add((chapter.name, task.name, ", ".join(below)))
    return table

"""The numbers in the walkthrough of ``fsdp`` are those that its examples print, or follow from them."""

import re
from pathlib import Path

from autograder.chapters.fsdp.alternatives import with_delay
from autograder.contract.task import load, references, trace
from course.machines import machine
from course.program import parse, timeline

SITE = Path(__file__).parent
NUMBER = r"\d+\.\d+"


def printed() -> set[str]:
    return {n for path in SITE.glob("examples/fsdp_*.txt") for n in re.findall(NUMBER, path.read_text())}


def _of(example: str) -> str:
    return (SITE / "examples" / f"{example}.txt").read_text()


def row(name: str) -> dict[str, float]:
    columns = ("step", "computing", "exposed", "times", "held")
    line = next(line for line in _of("fsdp_prefetch").splitlines() if line.startswith(name))
    return dict(zip(columns, map(float, re.findall(NUMBER, line)), strict=True))


def test_numbers_of_the_walkthrough_are_printed_or_follow():
    text = (SITE / "pages" / "profiling" / "fsdp.md").read_text()
    prose = re.sub(r"```.*?```|<figure.*?</figure>", "", text, flags=re.DOTALL)
    task = load("fsdp").task("fsdp_train_step")
    assert task.at_scale
    delayed = timeline(parse(trace(task, with_delay, task.at_scale[0], lambda _: None)), machine(task.machine))
    carried = delayed.seconds / references("fsdp")["fsdp_train_step"]["seconds"]["reference"]
    unknown = set(re.findall(NUMBER, prose)) - printed() - {f"{carried:.2f}"}
    assert not unknown, f"no example prints {sorted(unknown)}"


def test_what_the_walkthrough_says_of_its_table_holds():
    before, after = row("gathers when it computes"), row("ahead in both passes")
    text = (SITE / "pages" / "profiling" / "fsdp.md").read_text()
    assert f"Here it was {before['exposed'] / before['step']:.0%} of the step".replace("%", " %") in text
    (gathers,) = map(float, re.findall(rf"all-gather +\d+ times +({NUMBER})", _of("fsdp_prefetch")))
    assert 0.9 * gathers < before["exposed"] < gathers, "what is exposed are the gathers, nearly all of them"
    assert row("ahead, backward by JAX")["exposed"] < 0.1 * before["exposed"] and after["held"] < 2 * before["held"]


def test_hybrid_sharding_pays_on_the_narrow_link_and_not_on_the_wide_one():
    steps = [float(n) for n in re.findall(rf"(?:each device|each node) +({NUMBER})", _of("fsdp_hybrid"))]
    assert len(steps) == 4
    assert 1 < steps[1] / steps[0] < 1.05, "no faster with an adapter for each device"
    assert 0.5 < steps[3] / steps[2] < 0.6, "little more than half as long with one for a node"

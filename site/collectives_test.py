"""Numbers in the prose of the pages on collectives that no example prints."""

import json
import re
from pathlib import Path

import jax
import pytest

from course.machines import machine

SITE = Path(__file__).parent
PAGE = " ".join((SITE / "pages/collectives.md").read_text().split())
STORY = " ".join((SITE / "pages/profiling/collectives.md").read_text().split())
UNITS = {"µs": 1e-6, "ms": 1e-3}


def row(section, figure):
    """A row of the profiling example's table, as numbers."""
    text = (SITE / "examples/collectives_profile.txt").read_text()
    block = re.search(rf"\[start:{section}\](.*?)--8<--", text, re.DOTALL)
    assert block
    line = next(line for line in block[1].splitlines() if line.startswith(figure))
    return [float(number) * UNITS.get(unit, 1) for number, unit in re.findall(r"([\d.]+) (µs|ms|MiB|B)", line)]


def test_the_story_says_what_its_tables_say():
    naive, rings, _ = row("h100", "step")
    assert f"becomes {naive / rings:.1f} times as fast" in STORY
    sent, peak = row("h100", "sent"), row("h100", "memory at the peak")
    assert sent[0] == 4 * sent[1] and f"{sent[0]:.0f} MiB, four times as much" in STORY
    assert f"from {peak[0]:.0f} to {peak[1]:.0f} MiB" in STORY
    assert row("h100", "of it")[0] == 10 * 64
    exposed, steps = row("a5000", "exposed")[1], row("a5000", "step")
    assert f"{100 * exposed / steps[1]:.0f} % of the two rings' step" in STORY
    assert 3.9 < steps[0] / steps[1] < 4.1 and 1.8 < steps[1] / steps[2] < 2
    link = machine("8xH100").links[0]
    assert f"{1e6 * (14 * link.latency + 112 * 2**20 / link.bandwidth):.0f} µs" in STORY


def test_where_two_rings_win_is_what_the_example_prints():
    printed = dict(re.findall(r"(\d+) KiB on (8x\w+)", (SITE / "examples/collectives_sizes.txt").read_text()))
    for kib, name in printed.items():
        link = machine(name).links[-1]
        assert float(kib) == round(4 / 3 * link.latency * link.bandwidth / 1024)
        assert f"{kib} KiB" in STORY


def test_the_answer_about_many_devices_is_the_formula():
    for n, said_bytes, said_time in ((8, "140", "2.8"), (800, "159.8", "3.2")):
        sent = 2 * (n - 1) / n * 80
        assert f"{sent:.4g}" == said_bytes and f"{sent / 50:.1f}" == said_time
        assert re.search(rf"= {said_bytes}\$ MB, {said_time} ms", PAGE)
        assert f"{2 * (n - 1):,}" in PAGE


@pytest.mark.skipif(jax.__version__ != "0.10.2", reason="the figures are of jax 0.10.2")
def test_joining_at_the_end_costs_more_than_three_times_the_peak():
    known = json.loads((SITE.parent / "autograder/chapters/collectives/references.json").read_text())[jax.__version__]
    held, whole = known["ring_all_gather"]["temporaries"], 8 * 16 * 2**20
    assert "more than three times what it must be" in PAGE
    assert 3 < (whole + held["naive"]) / (whole + held["reference"]) < 3.5

"""The numbers in the text of the chapter's two pages are those of the examples, the formulas and the sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from course.machines import machine
from course.validation.single_device import RUNS, Sizes

SITE = Path(__file__).parent
PAGE, WALK = SITE / "pages" / "single_device.md", SITE / "pages" / "profiling" / "single_device.md"
PRINTED = "\n".join(path.read_text() for path in sorted((SITE / "examples").glob("single_device_*.txt")))
PARAMETERS = 155_877_376


def section(name):
    return re.search(rf"<!-- {name}: .*?-->(.*?)<!-- end of the {name} -->", PAGE.read_text(), re.DOTALL)[1]


def numbers(text):
    return set(re.findall(r"\d[\d,]*(?:\.\d+)?", re.sub(r", |,\n", " ", text)))


def prose(page):
    """The text of a page without code, links, comments, formulas, references and sources."""
    text = page.read_text().split("## Sources")[0]
    for left_out in (
        r"<code>.*?</code>",
        r"```.*?```",
        r"<!--.*?-->",
        r'--8<-- "[^"]*"',
        r"`[^`]*`",
        r"\]\([^)]*\)",
        r"\$\$.*?\$\$",
        r"\$[^$]*\$",
    ):
        text = re.sub(left_out, " ", text, flags=re.DOTALL)
    return re.sub(r"<div.*?>|\(?(?:sections?|et al\.|and Gimelshein|and Staats) [\d.]+(?: and [\d.]+)?", " ", text)


def test_tokens_at_which_products_are_limited_by_computing_are_the_machines():
    expected = []
    for name, label in (("8xA5000", "A5000"), ("8xA100", "A100 80 GB"), ("8xH100", "H100 SXM")):
        found = machine(name)
        peak, bandwidth = found.matmul_flops["bf16"], found.memory_bandwidth
        expected.append(f"| {label} | {peak / 1e12:.1f} | {bandwidth / 1e9:,.0f} | {peak / bandwidth:.0f} |")
    assert [line for line in section("roofline").splitlines() if line.startswith(("| A", "| H"))] == expected


def test_accumulation_costs_what_the_formula_gives():
    found, sizes, run = machine("8xA5000"), Sizes(), RUNS[3]
    seconds = 3 * 4 * PARAMETERS / found.memory_bandwidth
    tokens = sizes.batch * sizes.sequence // run.num_microbatches
    enough = found.matmul_flops["bf16"] / found.memory_bandwidth
    text = " ".join(section("accumulation").split())
    for said in (
        f"{PARAMETERS:,} parameters",
        f"{found.memory_bandwidth / 1e9:.0f} GB/s",
        f"{1e3 * seconds:.1f} ms",
        f"{run.seconds} s",
        f"{100 * run.num_microbatches * seconds / run.seconds:.1f} %",
        f"{tokens:,} tokens, {int(tokens / enough)} times",
    ):
        assert said in text, said


# What others state, sizes, and small whole numbers that count something.
SIZES = {f"{size:,}" for size in (PARAMETERS, 12, 1024, 2048, 64, 512, 8192, 32768, 5000, 24, 16, 32, 96)} | {"2024"}
STATED = {
    WALK: SIZES | {f"{run.peak / 1e9:g}" for run in RUNS} | {f"{run.seconds:g}" for run in RUNS} | {"0.1", "90", "10"},
    PAGE: SIZES | {"70", "2.7", "4,096", "65,504", "65,536", "2,000", "20", "256", "0.001", "1.0078", "0.06", "1.333",
                   "3.1", "2.4", "0.91", "1.1", "56", "768", "111.1", "145", "312.0", "2,039", "153", "80", "989.4",
                   "3,350", "295", "100", "36", "98,304", "16,384", "49,152", "4.2", "8.4", "65", "0.5", "3"},
}  # fmt: skip


@pytest.mark.parametrize("page", [PAGE, WALK], ids=["page", "walkthrough"])
def test_every_number_in_the_text_is_printed_or_stated(page):
    known = numbers(PRINTED) | STATED[page] | {str(small) for small in range(11)}
    unknown = {number.rstrip(",") for number in numbers(prose(page))} - known
    assert not unknown, f"nothing gives {sorted(unknown)}"


def test_worked_answers():
    assert 2.0**-7 + 1 == 1.0078125 and 16 * 2.0**-7 / 2 == 0.0625
    assert 3 * 32_768 == 98_304 > 65_504 > 3 * 16_384 == 49_152
    assert sum(range(1, 9)) == 36
    assert (f"{64 / 20 + 1:.1f}", f"{8 / 20 + 8:.1f}") == ("4.2", "8.4")
    assert f"{7 / 6:.3f}" in PRINTED


def test_headings_that_facts_point_to_are_there():
    headings = re.findall(r"^#+ (.*)$", PAGE.read_text(), re.MULTILINE)
    assert {
        "Numbers with fewer bits",
        "Accumulating gradients",
        "Depth as a loop",
        "Computing again instead of keeping",
        "Scaling the loss",
        "Attention in chunks",
        "Mistakes that cost people days",
    } <= set(headings)

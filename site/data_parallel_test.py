"""The numbers in the prose of ``data_parallel`` and of its walkthrough are computed here, or printed by examples."""

import re
from pathlib import Path

import numpy as np
import pytest

from autograder.chapters.data_parallel import overlap
from autograder.contract.task import load
from course.machines import machine

SITE = Path(__file__).parent
# With decimals or with thousands; small whole numbers are words of the sentence.
NUMBER = r"\d+\.\d+|\d{1,3}(?:,\d{3})+"


def prose(page: str) -> str:
    """A page without code, pictures, sources, and the sections of papers that it names."""
    text = (SITE / "pages" / f"{page}.md").read_text().split("## Sources")[0]
    return re.sub(r"```.*?```|<figure.*?</figure>|sections? \d[\d. and]*\d|section \d", "", text, flags=re.DOTALL)


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(rf"{NUMBER}|\b\d+\b", text)]


def rows(example: str) -> dict[str, list[float]]:
    """The numbers of each line that an example printed, by what stands before them."""
    found = {}
    for line in (SITE / "examples" / f"{example}.txt").read_text().splitlines():
        label, _, rest = line.strip().partition("  ")
        found[label] = numbers(rest)
    return found


def test_every_number_of_the_page_is_computed_here_or_has_a_source():
    ours = {"15.5", "1,024", "131,072", "7.875"}  # each has its test below
    goyal = {"8,192"}  # Goyal et al. 2017: the largest batch without loss of accuracy
    assert set(re.findall(NUMBER, prose("data_parallel"))) == ours | goyal


def test_means_sums_and_reductions_of_the_four_functions():
    text = prose("data_parallel")
    batch = np.arange(32.0).reshape(8, 4)
    said = rows("data_parallel_reductions")
    mean, total = batch.mean(), batch.mean(axis=1).sum()
    assert f"every entry of the mean gradient is {mean:g}" in text and "sum of 1,024 weights" in text
    assert f"{total:g} where {mean:g} was wanted, {total / mean:g} times too large" in text
    assert said["varying"][:2] == [batch[2].mean(), batch[7].mean()] != [mean, mean]
    once = 2 * 7 / 8 * 4 * 1024
    sends = {"replicated": (total, 4, 4), "replicated_then_pmean": (total, 5, 5), "replicated_half": (total, 4, 2)}
    for name, (entry, runs, times) in {**sends, "varying_then_pmean": (mean, 1, 1)}.items():
        assert (said[name][:3], said[name][-1]) == ([entry, entry, runs], times * once), name


def test_an_all_gather_of_gradients_sends_half_of_n_times_as_much():
    for n in (2, 8, 64):
        assert (n - 1) / (2 * (n - 1) / n) == pytest.approx(n / 2)
    eight, more = (2 * (n - 1) / n * 4 for n in (8, 64))
    assert f"= {eight:g}$ GB, and" in prose("data_parallel") and f"= {more:g}$ GB." in prose("data_parallel")
    assert more / eight == 1 + 1 / 8, "an eighth more"


def test_tokens_that_hide_a_reduction_follow_from_the_machines():
    said = rows("data_parallel_tokens")
    for label, name, wire in (
        ("A5000, pairs and PCIe", "8xA5000", 2 * 31.5e9),
        ("A100, NVLink", "8xA100", np.inf),
        ("H100, NVLink", "8xH100", np.inf),
        ("H100, 400 Gbit/s network", "8xH100", 400e9 / 8),
    ):
        of = machine(name)
        peak, beta = of.matmul_flops["bf16"], min(wire, of.links[0].bandwidth)
        backward, reduction = 4 / peak, 2 * 7 / 8 / beta  # seconds a token and parameter, seconds a byte
        assert said[label][-2:] == [round(size * reduction / backward) for size in (4, 2)], label


def test_speed_on_more_devices_is_what_the_page_says_of_it():
    text, said = prose("data_parallel"), rows("data_parallel_tokens")
    assert "of 131,072 tokens and $10^9$ parameters on H100s in a network of 50 GB/s each way" in text
    peak, alone, gains = machine("8xH100").matmul_flops["bf16"], 6 * 131072 * 1e9, {}
    for n in (1, 2, 4, 8, 16, 32, 64, 128):
        backward, reduction = 4 / 6 * alone / n / peak, 2 * (n - 1) / n * 4e9 / 50e9
        steps = backward / 2 + backward + reduction, backward / 2 + max(backward, reduction)
        turns, beside = (round(alone / peak / step, 1) for step in steps)
        assert said[str(n)][-2:] == [turns, beside]
        gains[n] = (alone / peak / steps[1], steps[0] / steps[1])
    best = sorted(gains, key=lambda n: gains[n][1])[-2:]
    assert sorted(best) == [4, 8] and "worth most in the middle, at 4 and 8 devices" in text
    assert all(speed <= 5 for speed, _ in gains.values()) and "no more than five\ndevices' worth of work" in text


def test_sizes_of_the_walkthrough_are_those_that_are_judged():
    sizes, text = overlap.ANALYSED[0].sizes, prose("profiling/data_parallel")
    each = sizes["rows"] // sizes["num_microbatches"]
    assert f"{sizes['num_layers']} layers, width {sizes['width']:,} and hidden size\n{sizes['hidden']:,}" in text
    assert sizes["num_microbatches"] == 2 and f"in two microbatches of {each:,} rows a device" in text
    assert load("data_parallel").task("overlapped_gradients").machine == "8xA5000"
    known = {f"{each:,}", f"{sizes['width']:,}", f"{sizes['hidden']:,}", "24.6", "0.05"}  # the last two: below
    assert set(re.findall(NUMBER, text)) == known


def test_what_the_walkthrough_says_of_its_timelines_holds():
    said = rows("data_parallel_overlap")
    end, same, later = (said[name] for name in ("at the end", "in the layer's own iteration", "one iteration later"))
    step, busy, exposed, share, sent = range(5)
    assert end[step] == pytest.approx(end[busy] + end[exposed]), "what the devices wait for is the whole reduction"
    assert end[sent] == same[sent] == later[sent], "as many bytes as before"
    assert 0.97 < same[step] / end[step] < 1, "hardly faster"
    assert later[share] == 0.1, "a tenth is left"
    assert end[step] - later[step] > end[exposed] - later[exposed], "faster by more than the hidden communication"
    ring = machine("8xA5000").bandwidth_of(tuple(range(8)))
    assert end[exposed] == pytest.approx(1e3 * end[sent] * 1e9 / ring, rel=0.01), "all of it, on a ring"


def test_what_the_walkthrough_says_of_the_compiler_holds():
    text, lines = prose("profiling/data_parallel"), (SITE / "examples" / "data_parallel_compiled.txt").read_text()
    ways = ("at the end", "in the layer's own iteration", "one later, summed then", "one later, summed before")
    exposed, held = ({way: rows("data_parallel_compiled")[way][at] for way in ways} for at in (1, -1))
    timed = [row[2] for name, row in rows("data_parallel_overlap").items() if name in (*ways, "one iteration later")]
    agreeing = (ways[0], ways[1], ways[3])
    assert [exposed[way] for way in agreeing] == pytest.approx(timed, rel=0.15)
    assert exposed[ways[2]] > 0.95 * exposed[ways[0]] and exposed[ways[3]] < 0.35 * exposed[ways[0]]
    assert held[ways[1]] == 24.6 > 24 and "needs 24.6 GB of temporaries" in text
    assert all(held[way] < 24 for way in ways if way != ways[1])
    large, small = (re.search(rf" {size} MB  in the loop  (\w+)", lines) for size in ("67.11", "0.05"))
    assert large and small and (large[1], small[1]) == ("beside", "alone")
    each, kernel = 2 * (overlap.ANALYSED[0].sizes["num_layers"] - 1), 4 * 2048 * 8192 / 1e6
    assert f"{each} x  {kernel:.2f} MB" in lines and f"{each} reductions of {kernel:.0f} MB" in text

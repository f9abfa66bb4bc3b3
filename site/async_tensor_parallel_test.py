"""The numbers on the pages of ``async_tensor_parallel`` are those that its examples print, or follow from them."""

import re
from pathlib import Path

import pytest

from autograder.chapters.async_tensor_parallel import mlp, rings
from autograder.chapters.async_tensor_parallel.shared import HIDDEN, TOKENS, WIDTH
from autograder.contract.task import references
from course.machines import machine

SITE = Path(__file__).parent
NUMBER = r"\d+(?:,\d{3})*\.\d+"
PAGE = (SITE / "pages" / "async_tensor_parallel.md").read_text()
STORY = (SITE / "pages" / "profiling" / "async_tensor_parallel.md").read_text()
KNOWN = references("async_tensor_parallel")
EXAMPLES = ("witnesses", "compiled", "passes", "loses")
# Of one device: rows of a chunk, features in and out.
ROWS, FEATURES = TOKENS // 8, HIDDEN // 8


def printed(example: str) -> str:
    return (SITE / "examples" / f"async_tensor_parallel_{example}.txt").read_text()


def prose(page: str) -> str:
    page = re.sub(r"<!-- (least features|steps):.*?<!-- end of \1 -->", "", page, flags=re.DOTALL)
    page = re.sub(r"^- .*?\]\(https.*?(?=\n\n|\n- |\Z)", "", page, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"```.*?```|<figure.*?</figure>|https?://\S+", "", page, flags=re.DOTALL)


def table(name: str, page: str = PAGE) -> list[list[str]]:
    said = re.search(rf"<!-- {name}: .*?-->(.*?)<!-- end of {name} -->", page, re.DOTALL)
    assert said
    rows = [line.strip("|").split("|") for line in said[1].strip().splitlines()]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def figures(example: str, row: str, after: str = "") -> list[float]:
    """The numbers of the first row of that name, behind a line that begins with ``after``."""
    text = printed(example)
    line = next(line for line in text[text.index(after) :].splitlines() if line.startswith(row))
    return [float(n.replace(",", "")) for n in re.findall(r"-?[\d,]+\.\d+|(?<=\s)[\d,]+(?=\s|$)", line[len(row) :])]


def seconds_of_a_step() -> dict[str, float]:
    h100 = machine("8xH100")
    latency, rate = h100.transfer("collective_permute", (0, 1), 0, 0, pair=(0, 1))
    return {
        "product": h100.matmul_seconds(2 * ROWS * WIDTH * FEATURES, 0, "f32"),
        "transfer": latency + 4 * ROWS * WIDTH / rate,
        "placing a product": h100.kernel_seconds(2 * 4 * ROWS * FEATURES),
        "adding to a sum": h100.kernel_seconds(3 * 4 * ROWS * WIDTH),
    }


def test_numbers_of_both_pages_are_printed_or_follow():
    step, ring = seconds_of_a_step(), KNOWN["ring_gather_matmul"]["seconds"]
    scatter = KNOWN["matmul_ring_scatter"]["seconds"]
    kernel = 4 * WIDTH * FEATURES
    follow = {
        f"{kernel / 2**20:.1f}", f"{1e6 * machine('8xH100').kernel_seconds(3 * kernel):.1f}",
        f"{2 * ROWS * WIDTH / 2**20:g}", f"{1e6 * step['product']:.1f}", f"{8 / 15:.2f}",
        f"{rings.TIME}", f"{mlp.EXPOSED}",
        f"{ring['reference'] / ring['naive']:.2f}", f"{scatter['reference'] / scatter['naive']:.2f}",
    }  # fmt: skip
    witnesses = figures("witnesses", "all-gather, then product", "second")
    follow_story = follow | {f"{witnesses[1] / witnesses[0]:.2f}"}
    known = {number for example in EXAMPLES for number in re.findall(NUMBER, printed(example))}
    for page, more in ((PAGE, follow), (STORY, follow_story)):
        unknown = set(re.findall(NUMBER, prose(page))) - known - more
        assert not unknown, f"no example prints {sorted(unknown)}"


def test_least_features_are_the_machines_operations_for_a_byte():
    for name, flops, bandwidth, features in table("least features"):
        where = machine(name)
        assert (flops, bandwidth) == (f"{where.peak('bf16') / 1e12:.1f}", f"{where.links[0].bandwidth / 1e9:g}")
        assert features == f"{round(where.peak('bf16') / where.links[0].bandwidth):,}"
    assert "on a TPU v5e, 1,970 instead of 3,940" in " ".join(PAGE.split())
    h100 = machine("8xH100")
    least = h100.peak("bf16") / h100.links[0].bandwidth
    assert HIDDEN / 16 < least < HIDDEN / 8 == 2304 and "2,304 on each, and on 16 it does not" in " ".join(PAGE.split())
    assert 4 / 2 * h100.peak("f32") / h100.links[0].bandwidth == pytest.approx(least, rel=1e-3)


def test_what_a_step_costs_is_the_machines_and_adds_up_to_what_the_timeline_says():
    found = seconds_of_a_step()
    assert {name: f"{1e6 * found[name]:.1f}" for name in found} == dict(table("steps"))
    product, added, placed = found["product"], found["adding to a sum"], found["placing a product"]
    assert 8 * product + 7 * added == pytest.approx(KNOWN["matmul_ring_scatter"]["seconds"]["reference"], rel=0.01)
    zeros = machine("8xH100").kernel_seconds(4 * TOKENS * FEATURES)
    both = 8 * (product + placed) + zeros
    assert both == pytest.approx(KNOWN["ring_gather_matmul"]["seconds"]["reference"], rel=0.01)


def test_rings_hold_a_quarter_to_a_third_of_the_synchronous_version():
    for name in ("ring_gather_matmul", "matmul_ring_scatter"):
        held = KNOWN[name]["temporaries"]
        assert 0.24 < held["reference"] / held["naive"] < 1 / 3


def test_the_page_says_of_the_measured_machine_what_its_tables_say():
    words = " ".join(PAGE.split())
    ideal, products, gather, permute, every = (
        figures("loses", name)
        for name in ("idealised", "measured products", "measured all-gather", "measured permute", "all of them")
    )
    assert products[2] >= 1 > ideal[2] and gather[2] < ideal[2] and permute[2] > 3 and every[2] > 2
    rows = [[float(n.replace(",", "")) for n in line.split()] for line in printed("loses").splitlines()[8:12]]
    assert [row[0] for row in rows] == [1024, 4096, 16384, 65536]
    assert all(row[3] > 1 for row in rows), "at no size does the ring win"
    assert rows[1][3] == every[2] and all(row[4] > row[2] for row in rows)
    size, rate = rows[1][1:3]
    assert f"one of {size:g} MiB travels at {rate} GB/s, about an eighth of the peak" in words
    assert 450 / rate == pytest.approx(8, abs=0.5)
    sent = 7 * size * 2**20 / ((gather[0] - figures("witnesses", "all-gather", "second")[1]) * 1e-6)
    assert sent / 1e9 / rate == pytest.approx(4, abs=0.1), "the all-gather sends four times as fast"
    assert f"Break-even at {size:g} MiB is {rows[1][4]:.0f} GB/s" in words and rows[1][4] < 200
    features = [[float(n.replace(",", "")) for n in line.split()] for line in printed("loses").splitlines()[14:19]]
    assert min(row[1] for row in features) == features[2][1] and features[2][0] == 2304
    assert min(row[2] for row in features) == features[-1][2] > 1


def test_what_the_pages_say_of_both_passes_holds():
    none, forward, jax, unrolled, kept, again = (
        figures("passes", name)
        for name in ("no ring", "rings in the forward pass alone", "rings, JAX's derivative", "the same, unrolled",
                     "rings, rows kept", "rings, rows sent again")
    )  # fmt: skip
    assert forward[2] / none[2] == pytest.approx(0.5, abs=0.01), "half of the exposed time is left"
    assert jax[2] == 0 and jax[3] == 1.18 and jax[1] - none[1] > none[2], "computing grew by more than exposed shrank"
    assert again[4] - kept[4] == pytest.approx(kept[4] / 4), "half of the forward pass's bytes"
    assert kept[0] < again[0] and again[5] < kept[5] < unrolled[5]
    compiled = [figures("compiled", name, "an MLP") for name in ("no ring", "rings, JAX's derivative", "rings, rows")]
    assert compiled[2][-3] > compiled[0][-3] and compiled[1][-3] > 1.1 * compiled[2][-3], "but no ring takes less"
    assert compiled[2][-1] < compiled[0][-1]


def test_what_the_walkthrough_says_of_the_witnesses_holds():
    text = printed("compiled")
    merged = text[text.index("rings in bfloat16, with the merge pass left on") :]
    assert re.search(r"ring, a Python loop +0 of 7", merged) and re.search(r"ring, a scan +7 of 7", merged)
    none, loop, scan, both = (
        figures("compiled", name)[-3:] for name in ("all-gather", "ring, a Python", "ring, a scan", "both ways")
    )
    assert all(ring[1] == 0 for ring in (loop, scan, both))
    assert scan[2] == loop[2] == none[2] / 2, "half of what the gathered rows take"
    assert figures("compiled", "ring, a Python", "rings in bfloat16")[-3] > none[0], "longer than with no ring at all"
    assert 1.7 < both[0] / none[0] < 2
    assert "in float32, the compiler leaves only 3 of its 7" in " ".join(STORY.split())
    assert re.search(r"rings in float32\nring, a Python loop +3 of 7", text)
    assert figures("witnesses", "all-gather", "second")[2] > 0.9 * figures("witnesses", "all-gather", "second")[1]

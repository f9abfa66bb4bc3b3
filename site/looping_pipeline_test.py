"""The numbers on the pages of ``looping_pipeline`` are those that its examples print, or follow from them."""

import re
from pathlib import Path

import pytest

from autograder.chapters.looping_pipeline.alternatives import by_hand as written_by_hand
from autograder.contract.task import load
from autograder.release.reference_metrics import look
from course.machines import machine
from course.schedules import num_ticks

SITE = Path(__file__).parent
NUMBER = r"\d+\.\d+"
PAGE = (SITE / "pages" / "looping_pipeline.md").read_text()
STORY = (SITE / "pages" / "profiling" / "looping_pipeline.md").read_text()


def _of(example: str) -> str:
    return (SITE / "examples" / f"looping_pipeline_{example}.txt").read_text()


def row(name: str) -> dict[str, float]:
    columns = ("step", "spent", "share", "held")
    line = next(line for line in _of("sync").splitlines() if line.startswith(name))
    return dict(zip(columns, map(float, re.findall(NUMBER, line)), strict=True))


def test_numbers_of_the_walkthrough_are_printed_or_follow():
    prose = re.sub(r"```.*?```|<figure.*?</figure>", "", STORY, flags=re.DOTALL)
    slow, fast = row("the same, layers in a scan")["step"], row("each repeat, while others run")["step"]
    task = load("looping_pipeline").task("looping_train_step")
    by_hand = 1e3 * look(task, written_by_hand)["seconds"]
    hidden = row("after the backward pass")["spent"] - row("each repeat, while others run")["spent"]
    copies = hidden - row("after the backward pass")["step"] + fast
    follow = {f"{slow / fast:.2f}", f"{by_hand:.1f}", f"{hidden:.1f}", f"{copies:.1f}", "0.25"}
    unknown = set(re.findall(NUMBER, prose)) - set(re.findall(NUMBER, _of("sync"))) - follow
    assert not unknown, f"no example prints {sorted(unknown)}"


def test_what_the_walkthrough_says_of_its_tables_holds():
    first, last = row("after the backward pass"), row("each repeat, while others run")
    assert last["share"] == pytest.approx(last["spent"] / first["spent"], abs=0.006) and last["share"] < 0.25
    words = " ".join(STORY.split())
    assert 1.6 < row("in every tick")["step"] / last["step"] < 2, "nearly twice as long"
    assert row("each repeat twice")["spent"] > 2 * last["spent"] and last["held"] > first["held"]
    saved = [float(line.split()[-1]) for line in _of("sync").splitlines() if re.match(r" +\d+ times", line)]
    hidden = first["spent"] - last["spent"]
    copies = last["step"] - last["spent"] - (first["step"] - first["spent"])
    assert f"these {hidden:.1f} ms, namely {saved[0]:.1f} ms" in words and f"which take {copies:.1f} ms" in words
    assert saved[1] == pytest.approx(2 * hidden - copies, rel=0.05) and 2.5 < saved[1] / saved[0] < 3.5
    assert saved[2] < 1.3 * saved[1] and saved[3] == pytest.approx(saved[2], rel=0.02), "grows no further"


def test_programs_have_the_bubble_of_the_formula():
    lines = [line.split() for line in _of("bubble").splitlines()[2:7]]
    assert [int(line[0]) for line in lines] == [1, 2, 4, 6, 16]
    for microbatches, *shares in lines:
        for repeats, found, form in zip((1, 2), shares[::2], shares[1::2], strict=True):
            assert found == form == f"{1 - repeats * int(microbatches) / num_ticks(4, int(microbatches), repeats):.4f}"


def test_times_of_averages_and_ticks_on_the_page_are_the_machines():
    said = re.search(r"<!-- looped averages: .*?-->(.*?)<!-- end of looped averages -->", PAGE, re.DOTALL)
    assert said
    numbers = [float(n) for n in re.findall(r"\| ([\d.]+) [mM]", said[1])]
    task = load("looping_pipeline").task("looping_train_step")
    assert task.analysed
    sizes, where = task.analysed[0].sizes, machine(task.machine)
    weights = 2 * sizes["width"] * sizes["hidden"]
    average = 2 * 3 / 4 * 4 * weights / where.links[-1].bandwidth
    tick = 3 * 2 * sizes["rows"] * weights / (where.peak("f32") * where.efficiency.matmul)
    count = sizes["num_microbatches"]
    assert numbers == [round(n, d) for n, d in ((4e-6 * weights, 1), (1e3 * average, 2), (1e3 * tick, 2),
                                               (1e3 * count * tick, 2))]  # fmt: skip


def test_bubbles_in_prose_follow_from_the_formula():
    def bubble(stages, microbatches, repeats):
        return 1 - repeats * microbatches / num_ticks(stages, microbatches, repeats)

    for microbatches, wanted in ((8, (27.3, 15.8, 8.6, 4.5)), (2, (60, 55.6, 52.9, 51.5))):
        shares = [round(100 * bubble(4, microbatches, repeats), 1) for repeats in (1, 2, 4, 8)]
        assert tuple(shares) == wanted
        assert all(f"{share:g}\\,\\%" in PAGE for share in shares)
    assert bubble(2, 8, 1) == pytest.approx(1 / 9) and bubble(2, 8, 8) == pytest.approx(1 / 65)
    assert f"{num_ticks(2, 8, 8) / 8 / num_ticks(2, 8, 1):.3f}" in PAGE


def test_the_published_ratio_and_ours_differ_by_less_than_two_percent():
    measured, predicted = map(float, _of("published").splitlines()[2].split()[-2:])
    assert measured == pytest.approx(190 / 205, abs=5e-4)
    assert predicted == pytest.approx(measured, rel=0.02)

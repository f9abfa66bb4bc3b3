"""The numbers on the pages of ``tensor_parallel`` are those that its examples print, or follow from them."""

import re
from pathlib import Path

import pytest

from autograder.contract.task import load
from course.machines import machine

SITE = Path(__file__).parent
NUMBER = r"\d+\.\d+"
PAGE = (SITE / "pages" / "tensor_parallel.md").read_text()
STORY = (SITE / "pages" / "profiling" / "tensor_parallel.md").read_text()

WAYS = (
    "weights come to the rows",
    "hidden features made whole",
    "all-reduce, then slice",
    "rows there, rows back",
    "the same, rows gathered again",
)


def _of(example: str) -> str:
    return (SITE / "examples" / f"tensor_parallel_{example}.txt").read_text()


def _between(name: str) -> str:
    said = re.search(rf"<!-- {name}: .*?-->(.*?)<!-- end of {name} -->", PAGE, re.DOTALL)
    assert said, name
    return said[1]


def row(name: str) -> dict[str, float]:
    columns = ("step", "busy", "exposed", "sent", "held")
    line = next(line for line in _of("mlp").splitlines() if line.startswith(name))
    numbers = line.removeprefix(name).split()
    return {column: float(number.replace(",", "")) for column, number in zip(columns, numbers, strict=True)}


def losses(which: str) -> list[list[float]]:
    """Of one device, step A and step B, under one optimizer; the last is the norm."""
    lines = _of("scale").splitlines()
    at = lines.index(which)
    return [[float(n) for n in re.findall(NUMBER, line)] for line in lines[at + 1 : at + 4]]


def test_numbers_of_the_walkthrough_are_printed():
    prose = re.sub(r"```.*?```|<figure.*?</figure>", "", STORY, flags=re.DOTALL)
    unknown = set(re.findall(NUMBER, prose)) - set(re.findall(NUMBER, _of("mlp")))
    assert not unknown, f"no example prints {sorted(unknown)}"


def test_what_the_walkthrough_says_of_its_tables_holds():
    task = load("tensor_parallel").task("tp_mlp")
    assert task.at_scale
    sizes = task.at_scale[0].sizes
    rows, hidden, weights = (4 * n / 2**20 for n in (sizes["rows"] * sizes["width"], sizes["rows"] * sizes["hidden"],
                                                     2 * sizes["width"] * sizes["hidden"]))  # fmt: skip
    assert re.findall(r"\| (\d+) \|", _between("arrays")) == [f"{n:.0f}" for n in (rows, hidden, weights)]
    before, whole, reduced, after, again = map(row, WAYS)
    assert before["sent"] == 7 / 8 * 2 * weights and after["sent"] == 7 / 8 * 4 * rows == before["sent"] / 4
    assert whole["sent"] == 0.75 * before["sent"] and whole["step"] == pytest.approx(before["step"], rel=0.02)
    assert reduced["sent"] == whole["sent"] / 2 and again["sent"] == 5 / 4 * after["sent"]
    assert again["held"] < after["held"]
    assert f"{after['exposed'] / after['step']:.0%}".replace("%", " %") in STORY
    table = [line.replace(",", "").split() for line in _of("mlp").splitlines()[8:]]
    steps = {int(count): (float(own), float(weights)) for count, own, _, weights in table}
    assert steps[512][1] > 10 * steps[512][0], "more than ten times as fast"
    assert steps[16384][1] < steps[16384][0] and steps[4096][1] > steps[4096][0], "in between they cross"
    assert sizes["hidden"] == 16384, "where both send as many bytes"


def test_features_that_hide_a_transfer_are_what_the_formula_gives():
    h100 = machine("8xH100")
    found = re.findall(r"\| (\d+) \| [^|]+ \| (\d+) \| ([\d,]+) \|", _between("features"))
    assert len(found) == 4 and float(found[0][1]) * 1e9 == h100.links[0].bandwidth
    for devices, bandwidth, features in found:
        wanted = (int(devices) - 1) * h100.peak("bf16") / (float(bandwidth) * 1e9)
        assert features == f"{wanted:,.0f}"


def test_adam_hides_the_factor_and_sgd_and_clipping_do_not():
    clips = "clipped by global norm, then "
    for name in ("SGD", f"{clips}SGD", "Adam", f"{clips}Adam"):
        one, right, wrong = losses(name)
        assert one == right, name
        assert wrong[-1] > 3 * one[-1], "the norm tells under each optimizer"
        assert (wrong[:-1] == one[:-1]) == (name == "Adam"), name
    assert losses("SGD")[2][-2] < losses("SGD")[0][-2], "lower"
    clipped = losses(f"{clips}SGD")
    assert clipped[2][-2] > clipped[0][-2], "worse"


def test_ratios_are_the_size_of_the_tensor_axis_for_parts_and_one_for_copies():
    lines = [line.split() for line in _of("scale").splitlines()[19:29]]
    parts = {name for name, *ratios in lines if ratios == ["4.000", "8.000", "1.000"]}
    assert parts == {"layers/down/kernel", "layers/up/bias", "layers/up/kernel"}
    assert all(ratios == ["1.000"] * 3 for name, *ratios in lines if name not in parts)
    norm, copies, split = map(float, re.findall(NUMBER, "".join(_of("scale").splitlines()[30:])))
    assert copies == pytest.approx(1 / norm, abs=1e-3) and split == pytest.approx(4 / norm, abs=2e-3)


def test_answers_to_the_questions_follow():
    collective = 7 / 8 * 2048 * 8192 * 2
    assert f"{collective / 1e6:.1f} MB" in PAGE and f"{4 * collective / 1e6:.1f} MB" in PAGE

"""The numbers on the pages of ``transformer_3d`` are those that its examples print, or follow from them."""

import importlib
import re
from pathlib import Path

import jax
import pytest

SITE = Path(__file__).parent
STORY = (SITE / "pages" / "profiling" / "transformer_3d.md").read_text()
PAGE = (SITE / "pages" / "transformer_3d.md").read_text()
NUMBER = r"\d+\.\d+"
JAX = "0.10.2"  # of which the pages' figures are
RECORDED = SITE / "examples" / "recorded"


def _of(example: str) -> list[str]:
    return (SITE / "examples" / f"transformer_3d_{example}.txt").read_text().splitlines()


def _recorded(name: str) -> list[str]:
    return (RECORDED / f"transformer_3d_{name}.txt").read_text().splitlines()


def row(lines: list[str], name: str, which: int = 0) -> list[float]:
    """The figures in the line that begins so."""
    line = [line for line in lines if line.startswith(name)][which]
    return [float(word) for word in line.removeprefix(name).split()]


def test_numbers_of_the_walkthrough_are_printed_or_follow():
    prose = re.sub(r"```.*?```|<figure.*?</figure>", "", STORY, flags=re.DOTALL)
    lines = _of("gathers")
    ticks, once = (row(lines, f"gathered {how}", 1) for how in ("in every tick", "once for a repeat"))
    follow = {f"{ticks[2] / once[2]:.2f}"}
    printed = "\n".join([*lines, *_recorded("billion"), *_recorded("peers"), *_recorded("again")])
    unknown = set(re.findall(NUMBER, prose)) - set(re.findall(NUMBER, printed)) - follow
    assert not unknown, f"no example prints {sorted(unknown)}"
    said = {int(number.replace(",", "")) for number in re.findall(r"([\d,]+) MiB", prose)}
    assert said <= {int(n) for line in lines for n in re.findall(r"\b\d+\b", line)}


def test_what_the_walkthrough_says_of_its_tables_holds():
    lines = _of("gathers")
    ticks, once = row(lines, "gathered in every tick"), row(lines, "gathered once for a repeat")
    kept = row(lines, "gathered once, and everything kept")
    assert ticks[2] > 2 * once[2] and kept[2] == once[2], "sends twice as much"
    assert once[0] > ticks[0] and once[3] > ticks[3], "the step is not shorter, and more is held"
    assert kept[3] > 2 * once[3] and kept[1] < once[1]
    many = row(lines, "gathered in every tick", 1), row(lines, "gathered once for a repeat", 1)
    assert many[0][1] > 2.5 * ticks[1] and many[1][1] < 1.2 * once[1], "hardly at all"
    assert many[0][0] > 1.05 * many[1][0]


def test_the_pages_closed_forms_are_those_of_the_six_meshes():
    lines = _of("numbers")
    rows = {name: row(lines, name) for name in ("2 x 2 x 2", "1 x 8 x 1", "8 x 1 x 1", "4 x 1 x 2")}
    assert 1.7 < rows["1 x 8 x 1"][0] / rows["2 x 2 x 2"][0] < 2.1, "holds twice as much as the others"
    assert all(rows[name][1] < 1.1 for name in ("2 x 2 x 2", "8 x 1 x 1", "4 x 1 x 2")), "next to nothing"
    assert rows["8 x 1 x 1"][2] / rows["8 x 1 x 1"][0] - 7 < 0.01, "D - 1 times what is held"
    head, layer = 32_000 * 2048, 12 * 2048**2
    assert f"{head / layer:.1f} layers" in " ".join(PAGE.split())


def test_what_the_walkthrough_says_of_a_billion_parameters_holds():
    lines = _recorded("billion")
    found = {}
    for mesh in ("2 x 2 x 2", "4 x 1 x 2"):
        for fsdp in ("on", "off"):
            line = next(line for line in lines if re.match(rf"{mesh} +{fsdp} ", line)).replace("%", "")
            found[mesh, fsdp] = [float(word) for word in line.split()[6:]]
    for mesh, part in (("2 x 2 x 2", 2), ("4 x 1 x 2", 4)):
        on, off = found[mesh, "on"], found[mesh, "off"]
        assert abs(off[3] / on[3] - part) < 0.05 * part, "halves, and quarters"
        assert on[0] < off[0] and on[5] < off[5] and on[4] < off[4] and on[7] > off[7]
        assert abs(on[0] / on[5] - 1) < 0.04 and abs(off[0] / off[5] - 1) < 0.04


def _peers() -> dict[tuple[str, str], list[float]]:
    """By mesh and step: ms, exposed ms and GiB as compiled; of peers our time by theirs, with its bounds."""
    found = {}
    for line in _recorded("peers")[5:]:
        mesh, step = line[:13].strip(), line[13:20].strip()
        found[mesh, step] = [float(figure) for figure in re.findall(r"[\d.]+", line[20:])]
    return found


def test_what_the_walkthrough_says_of_its_peers_holds():
    found = _peers()
    meshes = ("2 x 2 x 2", "1 x 2 x 4", "4 x 1 x 2", "8 x 1 x 1", "1 x 8 x 1", "1 x 1 x 8")
    assert set(found) == {(mesh, step) for mesh in meshes for step in ("ours", "placed", "guided")}
    for mesh in meshes:
        ours, placed, guided = (found[mesh, step] for step in ("ours", "placed", "guided"))
        assert ours[0] < placed[0] and ours[2] < placed[2], mesh
        assert (ours[0] < guided[0] and ours[2] < guided[2]) == (mesh in ("1 x 2 x 4", "1 x 1 x 8")), mesh
    assert found["1 x 8 x 1", "placed"][0] / found["1 x 8 x 1", "ours"][0] > 5
    assert found["2 x 2 x 2", "guided"][:3] == found["4 x 1 x 2", "guided"][:3], "the same program"
    ratios = [found[mesh, "guided"][3] for mesh in meshes]
    assert f"ours takes {min(ratios):.2f} to {max(ratios):.2f} times as long" in " ".join(STORY.split())
    repeats, microbatches, stages = 2, 16, 8
    assert f"{stages - 1} of {repeats * microbatches + stages - 1} ticks" in STORY


@pytest.mark.skipif(jax.__version__ != JAX, reason=f"the pages' figures are of jax {JAX}")
def test_a_recorded_row_is_what_the_lenses_say_now(monkeypatch):
    monkeypatch.syspath_prepend(str(RECORDED))
    billion = importlib.import_module("transformer_3d_billion")
    line = billion.predicted(billion.WAYS[0], True)
    assert any(kept.startswith(line) for kept in _recorded("billion")), f"{line}\nrun transformer_3d_billion.py again"


def test_parameters_that_the_pages_name():
    from course.budget import Sizes

    count = Sizes(layers=16, width=2048, heads=16, vocab=32_000, seq=1024).count
    for text in (PAGE, STORY):
        assert f"{count / 1e6:.0f} million parameters" in " ".join(text.split())

"""The numbers on the two pages of ``pipeline`` are those that its examples print, or follow from them."""

import re
from pathlib import Path

import pytest

SITE = Path(__file__).parent
NUMBER = r"\d+\.\d+"
WALKTHROUGH = (SITE / "pages" / "profiling" / "pipeline.md").read_text()
PAGE = (SITE / "pages" / "pipeline.md").read_text()


def example(name: str) -> str:
    return (SITE / "examples" / f"pipeline_{name}.txt").read_text()


def prose(page: str) -> str:
    """Without code, pictures, formulas and the list of sources."""
    return re.sub(r"```.*?```|<figure.*?</figure>|\$.*?\$|## Sources.*", "", page, flags=re.DOTALL)


def rows(name: str, columns: int) -> dict[str, list[float]]:
    """The last numbers of each line, by what stands before them."""
    found = {}
    for line in example(name).splitlines()[1:]:
        *_, label = re.findall(rf"^(.*?)((?:\s+[\d.]+){{{columns}}})$", line)
        found[" ".join(label[0].split())] = [float(n) for n in label[1].split()]
    return found


def test_numbers_of_the_walkthrough_are_printed_or_follow():
    printed = {n for path in SITE.glob("examples/pipeline_*.txt") for n in re.findall(NUMBER, path.read_text())}
    loss = rows("loss", 5)
    every, branch, parts = (loss[name] for name in loss)
    follow = {f"{every[0] - branch[0]:.2f}", f"{parts[2] / every[2]:.2f}"}
    unknown = set(re.findall(NUMBER, prose(WALKTHROUGH))) - printed - follow
    assert not unknown, f"no example prints {sorted(unknown)}"
    assert f"{every[3]:.2f} J" in WALKTHROUGH and f"{branch[3]:.2f} J" in WALKTHROUGH
    assert branch[2] >= every[2] > 1.15 * parts[2], "a branch saves no time, parts do"
    assert branch[3] < 0.85 * every[3] and parts[4] < 0.5 * every[4]


def test_what_the_walkthrough_says_of_idle_stages_holds():
    found = rows("idle", 4)
    for count in (2, 8, 32):
        garbage, nothing = found[f"{count} garbage"], found[f"{count} nothing"]
        assert nothing[0] / garbage[0] == pytest.approx(count / (count + 7), rel=1e-3), "FLOPs as the formula has it"
        assert f"{nothing[1] / garbage[1] - 1:.0%}" == "6%" and "rises by 6 %" in prose(WALKTHROUGH)
    assert found["2 nothing"][3] / found["2 garbage"][3] == pytest.approx(0.5, abs=0.05)
    assert 1 - found["32 nothing"][3] / found["32 garbage"][3] == pytest.approx(1 / 20, abs=0.01)


def test_what_the_walkthrough_says_of_memory_holds():
    found = {line.split()[0]: [float(n) for n in line.split()[1:]] for line in example("memory").splitlines()[1:]}
    few, many = found["4"], found["32"]
    assert f"from {few[0]:.0f} to {many[0]:.0f} MiB: {(many[0] - few[0]) / 28:.0f} MiB for each" in " ".join(
        WALKTHROUGH.split()
    )
    assert f"The growth is {(many[2] - few[2]) / 28:.0f} MiB a microbatch" in WALKTHROUGH
    assert all(row[2] <= row[4] and row[3] < row[1] for row in found.values())


def test_bubbles_on_the_page_are_the_formulas():
    for line in example("bubble").splitlines()[1:]:
        stages, count, ticks, found, form = map(float, line.split())
        assert ticks == stages + count - 1
        assert found == pytest.approx((stages - 1) / ticks, abs=1e-4) and form == pytest.approx(found, rel=0.01)
    assert pytest.approx(0.1) == (8 - 1) / (63 + 8 - 1) and "63" in PAGE


def test_the_hang_is_found_and_named():
    replicated, varying = example("hang").splitlines()
    assert "devices would wait for each other forever" in replicated and "no collective" in varying


def test_the_budget_in_the_notebook_is_the_closed_form():
    from autograder.chapters.pipeline.step import PIPELINE_TRAIN_STEP, most_bytes

    assert PIPELINE_TRAIN_STEP.at_scale
    most = most_bytes(PIPELINE_TRAIN_STEP.at_scale[0]) / 2**20
    text = (SITE.parent / "solutions" / "pipeline.py").read_text()
    assert f"at most {most:.0f} MiB of temporaries" in text

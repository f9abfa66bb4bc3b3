"""The numbers on the two pages of ``tp_transformer`` are those that its examples print, or follow from them."""

import importlib.util
import re
from pathlib import Path

import jax
import pytest

SITE = Path(__file__).parent
NUMBER = r"\d+\.\d+"
JAX = "0.10.2"  # of which the pages' figures are
RECORDED = SITE / "examples" / "recorded" / "tp_transformer_billion"
WALKTHROUGH = (SITE / "pages" / "profiling" / "tp_transformer.md").read_text()
PAGE = (SITE / "pages" / "tp_transformer.md").read_text()


def example(name: str) -> str:
    return (SITE / "examples" / f"tp_transformer_{name}.txt").read_text()


def prose(page: str) -> str:
    """Without code, pictures, formulas, links and the list of sources."""
    cut = r"```.*?```|<figure.*?</figure>|\$\$.*?\$\$|\$[^$]*\$|\]\([^)]*\)|## Sources.*"
    return re.sub(cut, "", page, flags=re.DOTALL)


def blocks() -> dict[tuple[str, str, str], list[float]]:
    """By width, block and way: MiB sent, and milliseconds and exposed ones on both machines."""
    found = {}
    for line in example("blocks").splitlines()[2:]:
        width, block, way, *figures = re.split(r"\s{2,}| (?=whole|rings)", line)
        found[width, block.strip(), way.strip()] = [float(n) for n in figures]
    return found


def recorded() -> dict[tuple[str, str, str], list[float]]:
    """By mesh, block and way: ms, exposed, MFU in percent and GiB as predicted; ms, exposed and GiB as compiled."""
    lines = RECORDED.with_suffix(".txt").read_text().splitlines()[3:]
    pattern = r"(\d x \d)\s+(in turn|side by side)\s*(whole|rings|-)(.*)"
    rows = [re.fullmatch(pattern, line) for line in lines]
    return {(row[1], row[2], row[3]): [float(n) for n in row[4].replace("%", "").split()] for row in rows if row}


def test_numbers_of_the_pages_are_printed_or_follow():
    texts = [*SITE.glob("examples/tp_transformer_*.txt"), RECORDED.with_suffix(".txt")]
    printed = {n for path in texts for n in re.findall(NUMBER, path.read_text())}
    for page in (WALKTHROUGH, PAGE):
        unknown = set(re.findall(NUMBER, prose(page))) - printed - {"0.94"}
        assert not unknown, f"no example prints {sorted(unknown)}"


def test_what_the_pages_say_of_one_layer_holds():
    found = blocks()
    assert len(found) == 8
    for width in ("2,048", "4,096"):
        turn, beside = found[width, "in turn", "whole"], found[width, "side by side", "whole"]
        assert beside[0] == turn[0] / 2, "half of the bytes"
        assert f"{beside[1]:.2f} ms instead of {turn[1]:.2f} ms" in " ".join(WALKTHROUGH.split())
        for block in ("in turn", "side by side"):
            whole, rings = found[width, block, "whole"], found[width, block, "rings"]
            assert rings[2] < 0.5 * whole[2] and rings[3] > whole[3], "less is exposed; the calibrated machine loses"
    narrow, wide = (found[w, "side by side", "whole"][1] / found[w, "in turn", "whole"][1] for w in ("2,048", "4,096"))
    assert narrow < wide, "the gain is larger where the model is narrow"
    assert found["4,096", "side by side", "rings"][2] == 0
    turn = [found["2,048", "in turn", way][1] for way in ("whole", "rings")]
    assert turn[1] == pytest.approx(turn[0], rel=0.02)
    assert f"{turn[1]:.2f} ms against {turn[0]:.2f} ms" in WALKTHROUGH


def test_what_the_page_says_of_logits_holds():
    every = 8 * 1024 * 32_000 * 4 / 2**20
    lines = example("logits").splitlines()
    gathered, parts = ([float(n.replace(",", "")) for n in line.split()[-3:]] for line in lines[3:])
    assert f"{every:,.0f} MiB in float32" in PAGE and gathered[0] == every and parts[0] == every / 8
    assert parts[2] < every, "by the compiler's account no device has all logits"
    assert gathered[1] > 4 * parts[1] and gathered[2] > 4 * parts[2]


def test_what_the_page_says_of_three_rules_holds():
    lines = example("scale").splitlines()
    rows = {line.split()[0]: (line.split()[1], [float(n) for n in line.split()[2:]]) for line in lines[1:-1]}
    assert len(rows) == 13
    for kind, ratios in rows.values():
        assert ratios == ([1, 1, 0.25] if kind == "split" else [1, 0.25, 0.25])
    norms = [float(n) for n in lines[-1].split()[-3:]]
    assert norms[0] == 1 and 0.8 < norms[1] < 1 and norms[2] == 0.25


def test_headings_that_facts_point_to_are_there():
    from autograder.chapters.tp_transformer import READ

    headings = re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)
    assert {page for page, _ in READ.values()} == {"tp_transformer"}
    assert {heading for _, heading in READ.values()} <= set(headings)


def test_flops_for_each_number_are_the_formulas():
    for line in example("numbers").splitlines()[1:5]:
        width, *found = (float(n.replace(",", "")) for n in re.findall(r"[\d,]+", line))
        for n, figure in zip((2, 4, 8), found, strict=True):
            assert figure == pytest.approx(9 * width / (n - 1), abs=0.5)


def test_the_billion_is_what_the_page_says():
    from course.budget import Sizes

    count = Sizes(layers=16, width=2048, heads=16, vocab=32_000, seq=1024).count
    assert f"{count / 1e9:.2f} billion parameters" in PAGE
    assert f"{count:,} parameters" in RECORDED.with_suffix(".txt").read_text()


def test_what_the_walkthrough_says_of_the_billion_holds():
    found = recorded()
    assert len(found) == 14
    text = " ".join(WALKTHROUGH.split())
    for name, (step, _, _, held, compiled, _, kept) in found.items():
        assert compiled == pytest.approx(step, rel=0.12), name
        assert kept == pytest.approx(held, rel=0.11), name
    turn = {mesh: figures for (mesh, block, way), figures in found.items() if block == "in turn" and way == "whole"}
    turn["8 x 1"] = found["8 x 1", "in turn", "-"]
    for block in ("in turn", "side by side"):
        ways = {mesh: found[mesh, block, "-" if mesh == "8 x 1" else "whole"] for mesh in turn}
        predicted, compiled = (sorted(ways, key=lambda mesh, i=i, ways=ways: ways[mesh][i]) for i in (0, 4))
        assert predicted == compiled and predicted[0] == "4 x 2" and predicted[-1] == "1 x 8"
    assert f"{turn['8 x 1'][3]:.2f} GiB for `8 x 1` and {turn['1 x 8'][3]:.2f} GiB" in text
    assert 32 * 1024 * 2048 * 4 / 2**20 == 256 and 256 * 2 * 16 / 1024 == 8
    beside = {way: found["1 x 8", "side by side", way] for way in ("whole", "rings")}
    assert beside["rings"][0] < beside["whole"][0] and beside["rings"][4] > beside["whole"][4]
    assert beside["whole"][4] < 0.85 * turn["1 x 8"][4]
    assert turn["2 x 4"][5] < 0.2 * turn["2 x 4"][1]


@pytest.mark.skipif(jax.__version__ != JAX, reason=f"the pages' figures are of jax {JAX}")
@pytest.mark.parametrize("row", [("side by side", "rings", 1, 8)])
def test_recorded_rows_are_what_the_lenses_say_now(row):
    spec = importlib.util.spec_from_file_location("billion", RECORDED.with_suffix(".py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    block, way, data, tensor = row
    line = module.row(way, block == "side by side", data, tensor, compiled=False)
    text = RECORDED.with_suffix(".txt").read_text()
    assert any(kept.startswith(line) for kept in text.splitlines()), f"{line}\nrun {RECORDED.name}.py again"

"""The report's means meet their goals, and the recorded results are the current results of the analyses."""

import math
import os
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, replace

import jax
import pytest

from course.machines import machine
from course.measured.rows import recorded_rows
from course.program import ProgramError
from course.program.compiled.plugin import AotMissing, find_plugin
from course.render.page_parts import generated
from course.validation import page, plot
from course.validation import rows as validation_rows
from course.validation.gap import gaps
from course.validation.gpus import H100, ours
from course.validation.means import means
from course.validation.plot import GB, GIB
from course.validation.report import main, mean_text, recorded, show, versions
from course.validation.rows import MEMORY, OWN_RATES, TABLES, TIME, every, rings, single_gpu
from course.validation.single_device import RUNS, Sizes, parameters


def has_compiler():
    try:
        find_plugin()
    except AotMissing:
        return False
    return True


COMPILER = pytest.mark.skipif(not has_compiler(), reason="the GPU compiler (extra aot) is not installed")
RECORDED = recorded()
AGAIN = "run: python -m course.validation --write"


@pytest.fixture(scope="module")
def short():
    return list(every(short=True, aot=False))


@pytest.fixture(scope="module")
def short_compiled():
    # Compiling the published runs takes half a minute; the rings check the compiler's current figures as well.
    return [*(single_gpu(True, True) if os.environ.get("MESHCRAFT_FULL") else ()), *rings(aot=True)]


def assert_as_recorded(rows):
    if versions() != RECORDED.versions:
        pytest.skip(f"recorded with {RECORDED.versions}")
    by_key = {(row.group, row.name, row.lens): row for row in RECORDED.rows}
    for row in rows:
        if row.found is not None:
            expected = by_key[row.group, row.name, row.lens]
            assert (row.published, row.unit, row.counts) == (expected.published, expected.unit, expected.counts), (
                row.name
            )
            assert row.found == pytest.approx(expected.found, rel=1e-4, abs=1e-9), f"{row.name}, {row.lens}: {AGAIN}"


def assert_goals_are_met(rows):
    missed = [f"{m.group}, {m.lens}: {mean_text(m)}" for m in means(rows) if m.met is False]
    assert not missed


@pytest.mark.long
def test_every_mean_of_the_short_form_meets_its_goal(short):
    assert_goals_are_met(short)


@pytest.mark.long
@COMPILER
def test_every_mean_of_the_compiled_short_form_meets_its_goal(short_compiled):
    assert_goals_are_met(short_compiled)


def test_every_recorded_mean_meets_its_goal():
    assert_goals_are_met(RECORDED.rows)


def test_rows_are_those_recorded(short):
    assert_as_recorded(short)


@COMPILER
def test_compiled_rows_are_those_recorded(short_compiled):
    assert_as_recorded(short_compiled)


def test_everything_is_recorded_and_nothing_is_missing_from_it():
    assert all(row.found is not None for row in RECORDED.rows)
    assert [gap.name for gap in RECORDED.gaps] == [run.name for run in RUNS]


def test_a_lens_that_was_not_requested_leaves_its_rows_unmeasured_and_out_of_every_mean(short):
    rows = [row for row in short if row.lens in ("compiled", "replay")]
    assert rows and all(row.found is None and row.note for row in rows)
    assert all(mean.error is None and mean.met is None for mean in means(rows))


def test_rows_that_a_lens_has_itself_used_are_in_no_mean(short):
    rows = [row for row in short if row.group == TABLES]
    assert [mean.rows for mean in means(rows)] == [sum(row.counts for row in rows)]
    assert all(row.counts is not row.name.endswith("calibrated") for row in rows)


def test_our_gpus_are_compared_by_what_was_measured_on_them_and_with_the_goals_of_the_a5000():
    assert H100 in dict(ours())
    for kind, own in ours():
        rows = [row for row in RECORDED.rows if row.group == own.memory]
        measured = recorded_rows(kind)
        assert [row.published * 1e9 for row in rows] == [
            pytest.approx(measured[f"step {run.name}"]["bytes"]) for run in RUNS for _ in ("liveness", "compiled")
        ]
        assert [mean.goal for mean in means(rows)] == [
            mean.goal for mean in means(RECORDED.rows) if mean.group == MEMORY
        ]
        assert own.own_rates and 0.6 < own.own_rates.efficiency.matmul < own.own_rates.efficiency.memory < 0.9


def test_timeline_of_a_run_splits_into_products_and_other_kernels_as_recorded():
    if versions() != RECORDED.versions:
        pytest.skip(f"recorded with {RECORDED.versions}")
    (now,) = gaps(RUNS[3:4], aot=False)
    assert asdict(now.timeline) == pytest.approx(asdict(RECORDED.gaps[3].timeline), rel=1e-4), AGAIN


@pytest.mark.parametrize("name", page.BLOCKS)
def test_table_on_the_page_is_what_is_recorded(name):
    assert generated(page.PAGE, name) == page.BLOCKS[name](RECORDED.rows), AGAIN


@pytest.mark.parametrize("name", plot.PLOTS)
def test_plot_on_the_page_is_what_is_recorded(name):
    drawn = plot.PLOTS[name](RECORDED.rows)
    assert (page.FIGURES / name).read_text() == drawn + "\n", AGAIN
    ElementTree.fromstring(drawn)


def test_plot_has_a_dot_for_every_figure_and_says_them_in_words():
    drawn = ElementTree.fromstring(plot.memory_plot(RECORDED.rows))
    space = "{http://www.w3.org/2000/svg}"
    dots = [e for tag in ("circle", "path") for e in drawn.iter(f"{space}{tag}")]
    assert len(dots) == 4 * len(RUNS) + 4
    assert drawn.get("role") == "img"
    assert all(run.name in (drawn.findtext(f"{space}desc") or "") for run in RUNS)


def test_numbers_in_the_text_are_those_recorded():
    text = " ".join(page.PAGE.read_text().split())
    efficiency = machine("8xA5000").efficiency
    for words in (
        f"{sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(parameters(Sizes()))):,} parameters",
        f"{efficiency.matmul:g} of the matrix peak and {efficiency.memory:g} of the memory bandwidth",
        f"differ by {100 * (GIB / GB - 1):.1f}%",
    ):
        assert words in text, words
    compiled = [row for row in RECORDED.rows if row.group == MEMORY and row.lens == "compiled" and row.found]
    assert all((row.found or 0) > row.published > (row.found or 0) * GB / GIB for row in compiled)
    assert "above all six published values" in text and len(compiled) == 6
    on_h100 = [r.published for r in RECORDED.rows if (r.group, r.lens) == (dict(ours())[H100].memory, "compiled")]
    units = [
        min((1.0, GIB / GB), key=lambda unit: abs(unit * r.published / o - 1))
        for r, o in zip(compiled, on_h100, strict=True)
    ]
    assert units == [1.0] * 2 + [GIB / GB] * 4 and "2^{30}$, the other four are" in text
    short = [mean.error for mean in means(RECORDED.rows) if mean.lens == OWN_RATES]
    assert [round(1 / (error or 1)) for error in short] == [10, 7]
    assert "a tenth too short on the H100 and a seventh" in text
    for (_, own), percent in zip(ours(), ("15% on the H100", "9% on the H200"), strict=True):
        ratios = [(r.found or 0) / r.published for r in RECORDED.rows if (r.group, r.lens) == (own.time, "timeline")]
        assert f"{100 * (max(ratios) / min(ratios) - 1):.0f}%" == percent.partition(" ")[0] and percent in text
    times = [[r for r in RECORDED.rows if (r.group, r.lens) == (TIME, lens)] for lens in ("timeline", "replay")]
    worst = [max(rows, key=lambda r: abs(r.error or 0)) for rows in times]
    assert [(row.name, (row.error or 0) < 0) for row in worst] == [("float32, scan", True), ("float32, scan", False)]


def test_on_our_gpus_the_timeline_is_closer_for_unrolling_and_recomputing_and_the_replay_for_other_changes():
    for _, own in ours():
        rows = {
            lens: [r for r in RECORDED.rows if (r.group, r.lens) == (own.time, lens)] for lens in ("timeline", "replay")
        }
        ratios = {lens: [(r.found or 0) / r.published for r in figures] for lens, figures in rows.items()}
        for before, after in ((1, 2), (1, 3), (1, 4)):
            timeline, replay = (ratios[lens][after] / ratios[lens][before] - 1 for lens in ("timeline", "replay"))
            assert abs(timeline) < 0.045 and -0.175 < replay < -0.115
        for before, after in ((0, 1), (3, 5)):
            timeline, replay = (abs(ratios[lens][after] / ratios[lens][before] - 1) for lens in ("timeline", "replay"))
            assert 0.01 < replay < timeline < 0.08


def test_a_compile_that_runs_out_of_time_says_so_in_its_rows_and_the_others_go_on(capsys, monkeypatch):
    def slow(run, name):
        raise ProgramError("the GPU compiler was stopped after 300 seconds")

    monkeypatch.setattr(validation_rows, "compiled_run", slow)
    rows = show(single_gpu(short=True, aot=True))
    lenses = [("liveness", False), ("compiled", True), ("timeline", False), ("replay", True)]
    kinds = len(list(ours()))
    assert [(row.lens, row.found is None) for row in rows] == lenses + [*lenses, (OWN_RATES, False)] * kinds
    assert capsys.readouterr().out.count("stopped after 300 seconds") == 2 + 2 * kinds


def test_rows_are_printed_as_they_come(capsys):
    def rows():
        yield RECORDED.rows[0]
        assert RECORDED.rows[0].name in capsys.readouterr().out
        yield RECORDED.rows[1]

    assert len(show(rows())) == 2


def test_bias_and_spread_are_of_the_errors_with_their_signs():
    (mean,) = means([replace(RECORDED.rows[0], published=1.0, found=value) for value in (1.3, 0.9)])
    assert (mean.error, mean.bias, mean.spread) == pytest.approx((0.2, 0.1, 0.2))


def test_only_a_whole_report_is_kept(capsys):
    for option in ("--short", "--no-aot"):
        with pytest.raises(SystemExit):
            main(["--write", option])
        assert "leave --short and --no-aot out" in capsys.readouterr().err


def test_figures_are_printed_without_exponents_negative_zeros_or_cut_names(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    show(RECORDED.rows)
    output = capsys.readouterr().out
    assert "131,072 bytes" in output and "e+" not in output and "…" not in output
    assert "-0.0%" not in output and "+0.0%" not in output
    assert "8xH100-calibrated" in output and "expected to miss" in output
    assert all(goal.endswith("%)") for goal in re.findall(r"\(goal: [^)]*\)", output))

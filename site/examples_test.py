"""Examples: the claims of each chapter's pages hold, and the kept results are what the examples compute now."""

from __future__ import annotations

import json
import os
import re
from string import Template

import computed  # in this folder, found through conftest.py
import jax
import pytest

from autograder.commands.new_chapter import TEMPLATE
from course.validation.report_test import has_compiler

FULL = bool(os.environ.get("MESHCRAFT_FULL"))
OURS = pytest.mark.skipif(jax.__version__ != computed.JAX, reason=f"the pages' figures are of jax {computed.JAX}")
KEPT = {file.stem: json.loads(file.read_text()) for file in sorted(computed.KEPT.glob("*.json"))}
# Those that the GPU compiler computes in less than a minute, and one of them that takes seconds.
COMPILED = [(chapter, name) for chapter, examples in KEPT.items() for name in examples if not examples[name]["slow"]]
SHORT = [("collectives", "with_compiler")]


@OURS
@pytest.mark.long
@pytest.mark.parametrize("chapter", computed.chapters())
def test_claims_of_a_chapter_hold(chapter):
    results = computed.compute(chapter)
    assert results["kept"] == {name: example["slow"] for name, example in KEPT.get(chapter, {}).items()}, (
        f"run: python site/computed.py --keep {chapter}"
    )


def test_the_example_of_a_new_chapter_makes_the_table_that_its_page_quotes(monkeypatch):
    template = TEMPLATE / "files/site/examples/NAME.py.template"
    monkeypatch.syspath_prepend(computed.EXAMPLES)
    module = {}
    words = {"title": "Loss", "name": "tp_transformer", "function": "vocab_parallel_loss"}
    exec(Template(template.read_text()).substitute(words), module)
    assert module["memory"]().cells()["naive"]["temporaries"]


@pytest.mark.parametrize("chapter", KEPT)
def test_kept_tables_show_their_kept_figures(chapter):
    for example in KEPT[chapter].values():
        for name, figures in example["figures"].items():
            if text := example["texts"].get(f"{name}.txt"):
                rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
                labels = [
                    ", ".join(row[: len(row) - len(cells)]) for row, cells in zip(rows, figures.values(), strict=True)
                ]
                assert labels == list(figures)
                assert [row[-len(cells) :] for row, cells in zip(rows, figures.values(), strict=True)] == [
                    list(cells.values()) for cells in figures.values()
                ]


@pytest.mark.long
@OURS
@pytest.mark.skipif(not has_compiler(), reason="the GPU compiler (extra aot) is not installed")
@pytest.mark.parametrize(("chapter", "name"), COMPILED if FULL else SHORT)
def test_recorded_results_equal_the_compiler_s(chapter, name):
    results = computed.run(chapter, [name])
    assert results["texts"] == KEPT[chapter][name]["texts"], f"run: python site/computed.py --keep {chapter} {name}"


@pytest.mark.long
@OURS
@pytest.mark.parametrize("chapter", ["tp_transformer", *(["transformer_3d"] if FULL else [])])
def test_a_row_of_a_slow_table_equals_the_analyses(chapter):
    rows = computed.run(chapter, ["again"])["figures"]["again"]
    for label, row in rows.items():
        now = {column: figure for column, figure in row.items() if figure != "nan"}
        expected = KEPT[chapter]["billion"]["figures"]["billion"][label]
        assert len(now) > 3 and now == {column: expected[column] for column in now}


# Decimals on a page that come from no example: figures from its sources, its own simple arithmetic, and versions.
STATED = {
    "collectives": {"0.014", "1.6"},
    "context_parallel": {"0.001"},
    "data_parallel": {"2.5", "7.875"},
    "fsdp": {"1.5", "1.75", "2.625", "3.5", "989.4"},
    "hardware": {"6.25"},
    "memory": {"0.12"},
    "networks": {"2.4"},
    "pipeline": {"0.1", "0.2", "1.6"},
    "planning": {"0.12", "0.5"},
    "primer": {"0.5", "2.5", "3.5", "4.5", "6.5"},
    "profiling/looping_pipeline": {"0.25"},
    "single_device": {"0.001", "0.5", "1.333", "2.7"},
    "tensor_parallel": {"1.5"},
    "traces": {"2.24"},
    "training": {"1.25"},
}
BACKGROUND = ("choosing", "goodput", "hardware", "inference", "low_precision", "networks", "techniques")
PAGES = {
    str(page.relative_to(computed.SITE / "pages").with_suffix("")): page
    for page in sorted(computed.SITE.glob("pages/**/*.md"))
    if page.stem in (*computed.chapters(), *BACKGROUND)
}


@pytest.mark.parametrize("name", PAGES)
def test_decimals_in_sentences_come_from_examples(name):
    text = PAGES[name].read_text().partition("## Sources")[0]
    text = re.sub(r'--8<-- ".*?"', "", text)  # its `<` opens no tag
    left_out = r"```.*?```|\{\{.*?\}\}|<[^>]*>|\]\([^)]*\)|(?:sections?|appendix)\s[\d.]+(?:(?:,| and| to) [\d.]+)*"
    decimals = set(re.findall(r"\d+\.\d+", re.sub(left_out, "", text, flags=re.DOTALL)))
    assert decimals == STATED.get(name, set()), "put {{ chapter.example[row].column }} where the number is"

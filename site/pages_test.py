"""Pages name files, functions, commands and options that exist."""

import inspect
import re
from pathlib import Path

import pytest

from autograder.commands.train import train
from autograder.contract import byte_facts, facts, limits, time_limits, value_facts, value_tasks
from autograder.learner.strategies import CHAPTERS as STRATEGIES
from autograder.learner.strategies import NAMES, default
from course.curriculum import CHAPTERS

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "site" / "pages").rglob("*.md"))
GUIDE, TRAINING = ((ROOT / "site" / "pages" / f"{name}.md").read_text() for name in ("contributing", "training"))


@pytest.mark.parametrize("chapter", [entry.name for entry in CHAPTERS])
def test_every_file_of_a_chapter_is_where_the_guide_says(chapter):
    paths = set(
        re.findall(r"`((?:course|solutions|exercises|autograder|site)/[\w/]*\.(?:py|ipynb|json|md|yml))`", GUIDE)
    )
    assert len(paths) > 12
    assert [path for path in paths if not (ROOT / path.replace("CHAPTER", chapter)).is_file()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_section_that_a_page_quotes_and_every_page_that_it_links_to_exists(page):
    text = page.read_text()
    for path, section in re.findall(r'--8<-- "([\w/]+\.py):(\w+)"', text):
        assert f"[start:{section}]" in (ROOT / path).read_text(), f"{path} has no section {section}"
    links = re.findall(r"\]\(([\w./]+\.md)[#)]", text)
    assert [link for link in links if not (page.parent / link).is_file()] == []


@pytest.mark.parametrize("module", [facts, byte_facts, limits, time_limits])
def test_every_fact_that_the_guide_names_exists(module):
    table = GUIDE.split(f"| in `{module.__name__}`")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (`.*?`) \|", table, re.M)
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(rows) >= 2 and len(names) >= 3 and all(callable(getattr(module, name, None)) for name in names)


@pytest.mark.parametrize("module", [value_tasks, value_facts])
def test_every_helper_for_answers_that_the_guide_names_exists(module):
    names = re.findall(rf"`{module.__name__.rpartition('.')[2]}\.(\w+)`", GUIDE)
    assert names and all(callable(getattr(module, name)) for name in names)


def test_commands_that_the_guide_types_are_the_makefiles():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    commands = set(re.findall(r"(?:`|^)make ([\w-]+)", GUIDE, re.M))
    assert len(commands) >= 6 and commands <= targets


def test_options_of_training_exist():
    options = {"--" + name.replace("_", "-") for name in inspect.signature(train).parameters} | {"--json", "--signal"}
    options |= {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--time"}  # SLURM's
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", TRAINING)) - {"--"} <= options


def test_strategies_of_training_are_those_that_there_are():
    assert re.findall(r"^\| `(\w+)` \| (?:`|$)", TRAINING, re.M) == list(NAMES)
    for name, strategy in STRATEGIES.items():
        (row,) = re.findall(rf"^\| `{name}` .*$", TRAINING, re.M)
        assert all(f"`{function}`" in row for function in strategy.functions)
    assert default({"pipe": 2}) == "transformer_3d" and default({}) == "compiler"


def test_the_budget_in_the_notebook_of_pipelines_is_the_closed_form():
    from autograder.chapters.pipeline.model import PIPELINE_TRAIN_STEP, most_bytes

    assert PIPELINE_TRAIN_STEP.at_scale
    most = most_bytes(PIPELINE_TRAIN_STEP.at_scale[0]) / 2**20
    assert f"at most {most:.0f} MiB of temporaries" in (ROOT / "solutions" / "pipeline.py").read_text()

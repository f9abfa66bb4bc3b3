"""The numbers on the page `training` are those of the text, the code and the recorded run."""

import re
from pathlib import Path

import yaml

from autograder.commands.train import train
from autograder.learner.strategies import CHAPTERS, NAMES, default
from autograder.proof.train_e2e import LIMIT, STEPS, THREE
from course.training.checkpoints import KEPT
from course.training.loop import Run, baseline
from course.training.processes import HEARTBEAT_SECONDS
from course.training.text import TRAINED_SHARE, VOCAB, read_text

SITE = Path(__file__).parent
PAGE = (SITE / "pages" / "training.md").read_text()
PRINTED = (SITE / "examples" / "training_run.txt").read_text()


def test_numbers_of_the_page_are_those_of_the_code():
    import inspect

    saved = inspect.signature(train).parameters["save_every"].default
    for said in (
        f"{len(read_text()):,} bytes",
        f"all {VOCAB} of them",
        f"Every {saved} steps",
        f"{HEARTBEAT_SECONDS} seconds without a sign of life",
    ):
        assert said in PAGE, said
    assert TRAINED_SHARE == 0.9 and KEPT == 2 and "first nine tenths" in PAGE and "two newest" in PAGE
    assert Run().schedule.final == 0.1 and "a tenth of the peak" in PAGE


def test_the_recorded_run_is_of_the_default_model_and_beats_the_bigram_model_of_the_same_bytes():
    losses = [float(loss) for loss in re.findall(r"validation loss (\d\.\d+),", PRINTED)]
    bigram = re.findall(r"a bigram model's (\d\.\d+)", PRINTED)
    assert bigram == [f"{baseline(Run()):.4f}"] and losses == sorted(losses, reverse=True)
    assert losses[-1] < float(bigram[0]) - 0.3
    sizes = Run().sizes
    assert f"width {sizes.width}, hidden {sizes.hidden}, num_layers {sizes.num_layers}" in PRINTED
    stopped = re.search(r"trained +([\d,]+) of ([\d,]+) steps", PRINTED)
    assert stopped and (("stopped before its last step" in PAGE) == (stopped[1] != stopped[2]))


def test_options_that_the_page_names_exist():
    import inspect

    known = {"--" + name.replace("_", "-") for name in inspect.signature(train).parameters} | {"--json", "--signal"}
    known |= {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--time"}  # SLURM's
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", PAGE)) - {"--"} <= known


def test_strategies_of_the_page_are_those_that_there_are():
    assert re.findall(r"^\| `(\w+)` \| (?:`|$)", PAGE, re.M) == list(NAMES)
    for name, made in CHAPTERS.items():
        (row,) = re.findall(rf"^\| `{name}` .*$", PAGE, re.M)
        assert all(f"`{function}`" in row for function in made.functions)
    assert default({"pipe": 2}) == "transformer_3d" and default({}) == "compiler"
    assert f"{STEPS} steps each" in PAGE and f"`{THREE}`" in PAGE and f"within {LIMIT} of each other" in PAGE


def test_the_page_is_in_the_navigation():
    class Loader(yaml.SafeLoader):
        """Reads mkdocs.yml without resolving MkDocs' own tags."""

    Loader.add_multi_constructor("!", lambda loader, suffix, node: node.value)
    config = yaml.load((SITE / "mkdocs.yml").read_text(), Loader)
    assert {"Training for real": "training.md"} in config["nav"]

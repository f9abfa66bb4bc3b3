"""What pages show as output is what their examples print and draw now.

``site/examples/<name>.py`` prints ``<name>.txt`` and saves pictures into the folder that it is given, which lie in
``site/figures``. ``python site/examples_test.py [NAME ...]`` runs them and keeps what they give.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import pytest

SITE = Path(__file__).parent
FIGURES = SITE / "figures"
EXAMPLES = sorted((SITE / "examples").glob("*.py"))
# Figures differ a little from one jax to another; those on the pages are of the oldest that the course runs on.
JAX = "0.10.2"
# Reading programs makes many objects and few cycles, and looking for these takes a while.
RUN = """
import gc, runpy, sys
gc.set_threshold(50_000, 20, 20)
del sys.argv[0]
sys.path[0] = sys.argv[0].rpartition("/")[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(example: Path, folder: Path) -> tuple[str, dict[str, str]]:
    """What the example prints, and its pictures by name."""
    environment = {**os.environ, "PYTHONPATH": str(SITE.parent), "COLUMNS": "110"}
    environment.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)  # a reader has them
    command = [sys.executable, "-c", RUN, str(example), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{example.name} failed:\n{done.stderr[-3000:]}")
    return done.stdout, {path.name: path.read_text() for path in sorted(folder.iterdir())}


@pytest.mark.skipif(jax.__version__ != JAX, reason=f"the pages' figures are of jax {JAX}")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_page_shows_what_the_example_prints_and_draws(example, tmp_path):
    printed, pictures = run(example, tmp_path)
    assert printed == example.with_suffix(".txt").read_text(), "run: python site/examples_test.py"
    for name, text in pictures.items():
        assert name.startswith(example.stem), f"{name}: a picture is called after its example"
        assert text == (FIGURES / name).read_text(), f"{name} has changed; run: python site/examples_test.py"


def main() -> None:
    """Run the examples that are named, or all, and keep what they give."""
    for example in EXAMPLES:
        if sys.argv[1:] and example.stem not in sys.argv[1:]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            printed, pictures = run(example, Path(folder))
        example.with_suffix(".txt").write_text(printed)
        for name, text in pictures.items():
            (FIGURES / name).write_text(text)
        print(f"{example.stem}: {len(printed.splitlines())} lines, {len(pictures)} pictures")


if __name__ == "__main__":
    main()

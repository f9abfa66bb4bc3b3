"""The command that judges each change of a notebook: watch."""

from __future__ import annotations

from typing import Annotated

import typer

from autograder.commands.learner import ChapterName, NotebookFile
from autograder.commands.notebooks import require_notebook
from autograder.commands.terminal import require_chapter, spinner


def watch(
    chapter: ChapterName,
    notebook: NotebookFile = None,
    script: Annotated[
        bool, typer.Option("--script", help="Also write the notebook as a script next to it: edit either.")
    ] = False,
) -> None:
    """Judge each change when you save, until you press q; keys show hints, the profile and more."""
    require_chapter(chapter)
    path = require_notebook(chapter, notebook)
    with spinner("starting"):
        from autograder.commands.watch import run
    run(chapter, path, script=script)

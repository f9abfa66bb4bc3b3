"""Pair a notebook with a py:percent script, for learners who use an editor: each is made from the other.

The script has the cells' sources only. A graded cell has its name in the marker, ``# %% shard_params``, which keeps
its nbgrader metadata; outputs stay in the notebook.
"""

from __future__ import annotations

import copy

import jupytext
import nbformat
from nbformat import NotebookNode

from autograder.release.converters import grade_id_of

_FORMAT = {"extension": ".py", "format_name": "percent"}
# The script's header has nothing more; none of the notebook's metadata is written into it.
_METADATA = {"jupytext": {"text_representation": _FORMAT, "notebook_metadata_filter": "-all"}}


class HalfWritten(Exception):
    """A script that lacks graded cells; the message names them."""


def script_text(notebook: NotebookNode) -> str:
    """Write the notebook's cells as a script."""
    bare = copy.deepcopy(notebook)
    bare.metadata = nbformat.from_dict(_METADATA)
    for cell in bare.cells:
        name = grade_id_of(cell)
        cell.metadata = nbformat.from_dict({"title": name} if name else {})
    return jupytext.writes(bare, fmt="py:percent")


def with_script(notebook: NotebookNode, script: str) -> NotebookNode:
    """Replace the sources of the notebook's cells by the script's; cells keep their metadata, ids and outputs.

    Raises:
        HalfWritten: A graded cell is missing, for example while a file is being written.
    """
    written = jupytext.reads(script, fmt="py:percent").cells
    left = {str(number): cell for number, cell in enumerate(notebook.cells)}
    names = {grade_id_of(cell): key for key, cell in left.items() if grade_id_of(cell)}
    missing = names.keys() - {cell.metadata.get("title") for cell in written}
    if missing:
        raise HalfWritten(f"it has no cell {', '.join(f'`# %% {name}`' for name in names if name in missing)}")
    aligned = len(written) == len(left)
    cells = []
    for number, cell in enumerate(written):
        like = (
            k for k, old in left.items() if not grade_id_of(old) and _same_kind(old, cell) and old.source == cell.source
        )
        counterpart = left.get(str(number)) if aligned else None
        place = (
            str(number)
            if counterpart is not None and not grade_id_of(counterpart) and _same_kind(counterpart, cell)
            else ""
        )
        key = names.get(cell.metadata.get("title", "")) or next(like, place)
        old = left.pop(key, None)
        merged = cell if old is None else copy.deepcopy(old)
        if old is None:
            cell.metadata = nbformat.from_dict({})
        elif merged.source != cell.source:
            merged.source = cell.source
            if merged.cell_type == "code":
                merged.outputs, merged.execution_count = [], None
        cells.append(merged)
    return NotebookNode({**notebook, "cells": cells})


def _same_kind(one: NotebookNode, other: NotebookNode) -> bool:
    return one.cell_type == other.cell_type

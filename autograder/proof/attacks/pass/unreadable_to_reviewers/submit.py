"""Metadata that a reader with other rules would stumble over: ids that are lists, NaN, equal keys, attachments of
numbers, metadata that is nothing. It is graded, and a person sees the code that was.

group: tampers
functions: shard_params
control: no: nbgrader cannot read it
"""

from __future__ import annotations

import json
from pathlib import Path

from autograder.proof.attacks.fixtures import answered


def submit(folder: Path, released: Path) -> None:
    notebook, cells = answered(released)
    source = cells["shard_params"]["source"]
    odd = {"cell_type": "code", "id": ["x"], "metadata": None, "attachments": 7, "outputs": float("nan")}
    notebook["cells"].append({**odd, "source": [source[:9], source[9:]]})
    notebook["cells"].append({**odd, "source": "", "metadata": {"nbgrader": 3, "meshcraft": "x"}})
    notebook["cells"].append({"cell_type": ["code"], "source": ["\ud800"], "metadata": [float("inf")]})
    cells["shard_params"]["source"] = "# see below"
    notebook["metadata"], notebook["nbformat"], notebook["nbformat_minor"] = [], "four", {"five": 5}
    text = json.dumps(notebook)
    (folder / released.name).write_text(text.replace('{"cells":', '{"cells": 7, "nbformat": 1, "cells":', 1))

"""Metadata of every wrong type, a grade id with a path and one that is a list; none of it is believed.

group: tampers
functions: shard_params
control: yes
"""

from __future__ import annotations

import json
from pathlib import Path

from autograder.proof.attacks.fixtures import answered


def submit(folder: Path, released: Path) -> None:
    notebook, _ = answered(released)
    odd = (
        None,
        7,
        [],
        "x",
        {"nbgrader": None},
        {"nbgrader": []},
        {"nbgrader": {"grade_id": ["x"]}},
        {"nbgrader": {"grade_id": "../../../secret", "points": "many"}},
        {"meshcraft": 7},
        {"meshcraft": {"name": {}}},
    )
    for number, metadata in enumerate(odd):
        cell = {"cell_type": "code", "id": f"odd-{number}", "source": "", "outputs": [], "execution_count": None}
        notebook["cells"].append({**cell, "metadata": metadata})
    notebook["metadata"] = {"meshcraft": {"functions": [{"name": "shard_params", "verdict": "pass", "lines": []}]}}
    notebook["nbformat_minor"] = "five"
    (folder / released.name).write_text(json.dumps(notebook))

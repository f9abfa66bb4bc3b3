"""A hundred times the points in the check cells' metadata; the points are the release's.

group: tampers
functions: shard_params
control: yes
"""

from __future__ import annotations

import json
from pathlib import Path

from autograder.proof.attacks.fixtures import answered


def submit(folder: Path, released: Path) -> None:
    notebook, cells = answered(released)
    for name in (*(name for name in cells if name and name.startswith("check-")), "question"):
        cells[name]["metadata"]["nbgrader"]["points"] *= 100
    (folder / released.name).write_text(json.dumps(notebook))

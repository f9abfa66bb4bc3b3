"""A hundred times the points in the check cells' metadata; the points are the release's.

group: tampers
functions: shard_params
control: yes
"""

from __future__ import annotations

import json
from pathlib import Path

from autograder.hostile.fixtures import answered


def submit(folder: Path, released: Path) -> None:
    notebook, cells = answered(released)
    for name in ("check-shard_params", "check-gather_params", "check-fsdp_loss", "question"):
        cells[name]["metadata"]["nbgrader"]["points"] *= 100
    (folder / released.name).write_text(json.dumps(notebook))

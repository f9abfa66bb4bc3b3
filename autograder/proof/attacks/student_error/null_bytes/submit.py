"""A zero byte in a cell's source, which Python does not parse; the cell fails and the others are run.

group: exhausts
functions: shard_params
control: yes
"""

from __future__ import annotations

import json
from pathlib import Path


def submit(folder: Path, released: Path) -> None:
    notebook = json.loads(released.read_text())
    notebook["cells"][1]["source"] = "x = 1\x00\ny = 2"
    (folder / released.name).write_text(json.dumps(notebook))

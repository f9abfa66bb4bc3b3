"""Half a character in a cell's source, which no encoding can write; the cell fails, and a page is written.

group: exhausts
functions: shard_params
control: yes
"""

from __future__ import annotations

import json
from pathlib import Path


def submit(folder: Path, released: Path) -> None:
    notebook = json.loads(released.read_text())
    notebook["cells"][1]["source"] = "x = '\ud800'"
    (folder / released.name).write_text(json.dumps(notebook))

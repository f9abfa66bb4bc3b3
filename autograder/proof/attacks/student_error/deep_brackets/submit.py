"""Brackets 10,000 deep in a constant; the parser says that they are too deep.

group: exhausts
functions: shard_params
control: yes
"""

from __future__ import annotations

import json
from pathlib import Path


def submit(folder: Path, released: Path) -> None:
    notebook = json.loads(released.read_text())
    notebook["cells"][1]["source"] = f"x = {'[' * 10_000}{']' * 10_000}"
    (folder / released.name).write_text(json.dumps(notebook))

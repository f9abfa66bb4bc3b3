"""An expression of 50,000 signs in front of each other, which overflows a parser's stack.

group: exhausts
functions: shard_params
control: no: ends the kernel
"""

from __future__ import annotations

import json
from pathlib import Path


def submit(folder: Path, released: Path) -> None:
    notebook = json.loads(released.read_text())
    notebook["cells"][1]["source"] = f"x = {'-' * 50_000}1"
    (folder / released.name).write_text(json.dumps(notebook))

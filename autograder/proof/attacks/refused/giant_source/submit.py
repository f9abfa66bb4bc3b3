"""A cell of a million lines; more than a person writes is refused before it is parsed.

group: exhausts
control: no: takes nbgrader minutes
"""

from __future__ import annotations

import json
from pathlib import Path


def submit(folder: Path, released: Path) -> None:
    notebook = json.loads(released.read_text())
    notebook["cells"][1]["source"] = "x = 1\n" * 10**6
    (folder / released.name).write_text(json.dumps(notebook))

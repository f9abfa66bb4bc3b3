"""A notebook of 100,000 cells; a notebook has at most 10,000, whatever they are.

group: exhausts
control: no: takes nbgrader minutes
"""

from __future__ import annotations

import json
from pathlib import Path


def submit(folder: Path, released: Path) -> None:
    notebook = json.loads(released.read_text())
    notebook["cells"] += [{"cell_type": "raw", "metadata": {}, "source": ""}] * 10**5
    (folder / released.name).write_text(json.dumps(notebook))

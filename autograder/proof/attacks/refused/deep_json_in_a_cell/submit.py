"""A right notebook but for an output of 100,000 lists in each other.

group: exhausts
control: yes
"""

from __future__ import annotations

import json
from pathlib import Path


def submit(folder: Path, released: Path) -> None:
    notebook = json.loads(released.read_text())
    text = json.dumps(notebook)
    deep = "[" * 10**5 + "]" * 10**5
    (folder / released.name).write_text(text.replace('"outputs": []', f'"outputs": {deep}', 1))

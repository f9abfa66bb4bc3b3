"""A number of a million digits in the notebook's JSON, which takes minutes to read as a number.

group: exhausts
control: yes
"""

from __future__ import annotations

import json
from pathlib import Path


def submit(folder: Path, released: Path) -> None:
    notebook = json.loads(released.read_text())
    text = json.dumps(notebook)
    (folder / released.name).write_text(text.replace('"nbformat": 4', '"nbformat": ' + "4" * 10**6, 1))

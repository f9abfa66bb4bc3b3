"""A folder in the notebook's place.

group: exhausts
control: yes
"""

from __future__ import annotations

from pathlib import Path


def submit(folder: Path, released: Path) -> None:
    (folder / released.name).mkdir()

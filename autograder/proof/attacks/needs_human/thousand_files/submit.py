"""A thousand files with long names and no notebook that is called as it must be; the message stays short.

group: exhausts
control: yes
"""

from __future__ import annotations

from pathlib import Path


def submit(folder: Path, released: Path) -> None:
    for number in range(1000):
        (folder / f"{number:0200}.ipynb").touch()

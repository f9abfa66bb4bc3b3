"""A notebook of 1 TiB, all of it a hole in the file; its size is looked at before it is read.

group: exhausts
control: no: would harm the machine
"""

from __future__ import annotations

from pathlib import Path


def submit(folder: Path, released: Path) -> None:
    with open(folder / released.name, "wb") as file:
        file.truncate(1 << 40)

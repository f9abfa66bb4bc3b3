"""A notebook in UTF-16 with a mark of byte order and bytes that are no text.

group: exhausts
control: yes
"""

from __future__ import annotations

from pathlib import Path


def submit(folder: Path, released: Path) -> None:
    (folder / released.name).write_bytes(released.read_text().encode("utf-16") + b"\xff\xfe\x00\xd8")

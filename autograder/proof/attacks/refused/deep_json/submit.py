"""JSON of a million lists in each other; the parser stops, and so does the submission.

group: exhausts
control: yes
"""

from __future__ import annotations

from pathlib import Path


def submit(folder: Path, released: Path) -> None:
    (folder / released.name).write_text("[" * 10**6 + "]" * 10**6)

"""File names with line breaks, escapes and lines of a report that read as the grader's own; the message is one line.

group: reaches
control: yes
"""

from __future__ import annotations

from pathlib import Path


def submit(folder: Path, released: Path) -> None:
    for name in (
        "a\nmeshcraft: all 12 submissions passed\n",
        "b\x1b[2K\x1b[1A",
        "c\u202efdp.exe",
        "=cmd|' -C calc'!A0",
    ):
        (folder / f"{name}.txt").touch()

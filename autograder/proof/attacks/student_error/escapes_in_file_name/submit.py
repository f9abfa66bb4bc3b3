"""A notebook whose file name has an escape and reversed writing; the note that names it shows neither.

group: reaches
functions: shard_params
control: yes
"""

from __future__ import annotations

from pathlib import Path


def submit(folder: Path, released: Path) -> None:
    (folder / "fsdp\x1b[31m\u202e(1).ipynb").write_bytes(released.read_bytes())

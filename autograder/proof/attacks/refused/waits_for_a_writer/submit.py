"""A named pipe in the notebook's place, so that whoever opens it waits for ever.

group: exhausts
control: no: never ends
"""

from __future__ import annotations

import os
from pathlib import Path


def submit(folder: Path, released: Path) -> None:
    os.mkfifo(folder / released.name)

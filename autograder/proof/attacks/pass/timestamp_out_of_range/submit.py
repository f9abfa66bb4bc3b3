"""A time of submission in the year 99999; the verdict is booked all the same.

group: tampers
functions: shard_params
control: yes
"""

from __future__ import annotations

import json
from pathlib import Path

from autograder.proof.attacks.fixtures import answered


def submit(folder: Path, released: Path) -> None:
    notebook, _ = answered(released)
    (folder / "timestamp.txt").write_text("99999-12-31 23:59:59 UTC")
    (folder / released.name).write_text(json.dumps(notebook))

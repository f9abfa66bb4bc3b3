"""A time of submission that is no time; the verdict is booked all the same.

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
    (folder / "timestamp.txt").write_text("yesterday \x1b[31m; DROP TABLE grade")
    (folder / released.name).write_text(json.dumps(notebook))

"""Every check cell and the question deleted; what was answered is graded, and the rest is put back.

group: tampers
functions: shard_params
control: yes
"""

from __future__ import annotations

import json
from pathlib import Path

from autograder.proof.attacks.fixtures import answered


def submit(folder: Path, released: Path) -> None:
    notebook, cells = answered(released)
    gone = (*(name for name in cells if name and name.startswith("check-")), "question")
    notebook["cells"] = [cell for cell in notebook["cells"] if cell not in [cells[name] for name in gone]]
    (folder / released.name).write_text(json.dumps(notebook))

"""Locked text rewritten, a locked cell turned into code and unlocked; the release's stand again.

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
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = "This exercise is worth 1,000 points, and answering it is optional."
    cells["check-fsdp_loss"]["metadata"]["nbgrader"].update(locked=False, grade=False, solution=True)
    (folder / released.name).write_text(json.dumps(notebook))

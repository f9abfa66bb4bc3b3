"""A notebook with 1,500 cells of notes, more than it may have of code; prose is ordinary, and it is graded.

group: exhausts
functions: shard_params
control: no: takes nbgrader minutes
"""

from __future__ import annotations

import json
from pathlib import Path

from autograder.proof.attacks.fixtures import answered


def submit(folder: Path, released: Path) -> None:
    notebook, _ = answered(released)
    note = {"cell_type": "markdown", "metadata": {}, "source": "A note."}
    notebook["cells"] += [{**note, "id": f"note-{number}"} for number in range(1500)]
    (folder / released.name).write_text(json.dumps(notebook))

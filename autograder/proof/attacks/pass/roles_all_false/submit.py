"""nbgrader metadata whose roles are all false, which breaks nbgrader's autograde; it is left out.

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
    roles = {"grade": False, "solution": False, "locked": False, "task": False, "schema_version": 3}
    for number, cell in enumerate(notebook["cells"]):
        if "nbgrader" not in cell["metadata"]:
            cell["metadata"]["nbgrader"] = {**roles, "grade_id": f"nothing-{number}"}
    (folder / released.name).write_text(json.dumps(notebook))

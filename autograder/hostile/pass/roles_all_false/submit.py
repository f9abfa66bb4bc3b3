"""nbgrader metadata whose roles are all false, which breaks nbgrader's autograde; it is left out.

group: tampers
functions: shard_params
control: yes
"""

from __future__ import annotations

import json
from pathlib import Path


def submit(folder: Path, released: Path) -> None:
    notebook = json.loads(released.read_text())
    cells = {cell["metadata"].get("nbgrader", {}).get("grade_id"): cell for cell in notebook["cells"]}
    source = (Path(__file__).parents[2] / "kits" / "honest.py").read_text()
    cells["shard_params"]["source"] = f"{source}\n\nshard_params = right_shards"
    roles = {"grade": False, "solution": False, "locked": False, "task": False, "schema_version": 3}
    for number, cell in enumerate(notebook["cells"]):
        if "nbgrader" not in cell["metadata"]:
            cell["metadata"]["nbgrader"] = {**roles, "grade_id": f"nothing-{number}"}
    (folder / released.name).write_text(json.dumps(notebook))

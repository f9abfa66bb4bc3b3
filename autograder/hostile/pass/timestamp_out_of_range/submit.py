"""A time of submission in the year 99999; the verdict is booked all the same.

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
    (folder / "timestamp.txt").write_text("99999-12-31 23:59:59 UTC")
    (folder / released.name).write_text(json.dumps(notebook))

"""Every check cell and the question deleted; what was answered is graded, and the rest is put back.

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
    gone = ("check-shard_params", "check-gather_params", "check-fsdp_loss", "question")
    notebook["cells"] = [cell for cell in notebook["cells"] if cell not in [cells[name] for name in gone]]
    (folder / released.name).write_text(json.dumps(notebook))

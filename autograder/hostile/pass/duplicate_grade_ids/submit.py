"""The check cell twice, and a second cell that claims the function's grade id; each counts once.

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
    twice = [cells["check-shard_params"], {**cells["shard_params"], "source": "shard_params_is_done = True"}]
    notebook["cells"] = [*twice, *notebook["cells"], *twice[:1]]
    (folder / released.name).write_text(json.dumps(notebook))

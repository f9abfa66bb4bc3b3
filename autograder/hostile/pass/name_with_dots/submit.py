"""A notebook whose name looks like a path out of the folder; it is graded, and written nowhere else.

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
    (folder / "..\\..\\..%2f..%2fsecret.ipynb").write_text(json.dumps(notebook))

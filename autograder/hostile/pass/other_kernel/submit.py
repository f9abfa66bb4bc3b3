"""A kernel of the student's own in the notebook's metadata, with a command to start; none is started.

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
    notebook["metadata"]["kernelspec"] = {"name": "mine", "display_name": "mine", "language": "bash"}
    notebook["metadata"]["language_info"] = {"name": "bash", "file_extension": ".sh"}
    notebook["metadata"]["kernel"] = {"argv": ["touch", "/tmp/kernel-was-started"]}
    (folder / released.name).write_text(json.dumps(notebook))

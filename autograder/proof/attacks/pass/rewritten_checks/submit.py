"""Check cells that print full points, and checks that are replaced before; nothing of it is run.

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
    for name in ("check-gather_params", "check-fsdp_loss"):
        cells[name]["source"] = "5.0"
        cells[name]["outputs"] = [
            {"output_type": "execute_result", "data": {"text/plain": "5.0"}, "metadata": {}, "execution_count": 1}
        ]
    cells["check-shard_params"]["source"] = "check = lambda *_: 1000.0\n1000.0"
    (folder / released.name).write_text(json.dumps(notebook))

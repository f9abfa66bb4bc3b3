"""The check cell twice, and a second cell that claims the function's grade id; each counts once.

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
    twice = [cells["check-shard_params"], {**cells["shard_params"], "source": "shard_params_is_done = True"}]
    notebook["cells"] = [*twice, *notebook["cells"], *twice[:1]]
    (folder / released.name).write_text(json.dumps(notebook))

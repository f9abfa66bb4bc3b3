"""A notebook whose name looks like a path out of the folder; it is graded, and written nowhere else.

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
    (folder / "..\\..\\..%2f..%2fsecret.ipynb").write_text(json.dumps(notebook))

"""Configuration, start-up files, a gradebook and a ledger beside the notebook; none of them is read.

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
    for name in ("nbgrader_config.py", "sitecustomize.py", "jax.py", "conftest.py", "gradebook.db", "fsdp.py"):
        (folder / name).write_text("raise SystemExit('read')")
    (folder / ".meshcraft").mkdir()
    (folder / ".meshcraft" / "ledger.sqlite").write_bytes(bytes(100))
    (folder / "fsdp.html").write_text("<script>alert(1)</script>")
    (folder / released.name).write_text(json.dumps(notebook))

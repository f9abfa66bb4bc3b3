"""A kernel of the student's own in the notebook's metadata, with a command to start; none is started.

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
    notebook["metadata"]["kernelspec"] = {"name": "mine", "display_name": "mine", "language": "bash"}
    notebook["metadata"]["language_info"] = {"name": "bash", "file_extension": ".sh"}
    notebook["metadata"]["kernel"] = {"argv": ["touch", "/tmp/kernel-was-started"]}
    (folder / released.name).write_text(json.dumps(notebook))

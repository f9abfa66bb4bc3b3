"""Scripts and frames as outputs of cells in every format that a browser shows; outputs are never shown.

group: reaches
functions: shard_params
control: yes
"""

from __future__ import annotations

import json
from pathlib import Path

from autograder.proof.attacks.fixtures import answered


def submit(folder: Path, released: Path) -> None:
    notebook, _ = answered(released)
    script = "<script>document.title='run'</script><img src=x onerror=alert(1)>"
    data = {
        "text/html": script,
        "image/svg+xml": f"<svg xmlns='http://www.w3.org/2000/svg'>{script}</svg>",
        "application/javascript": "document.title='run'",
        "text/markdown": script,
        "text/plain": "\x1b[2J10.0",
    }
    shown = {"output_type": "display_data", "data": data, "metadata": {}}
    printed = {"output_type": "stream", "name": "stdout", "text": f"\x1b]0;run\x07{script}"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = [shown, printed]
    (folder / released.name).write_text(json.dumps(notebook))

"""An honest notebook with 12 MB of outputs; it is refused, and says how large it may be.

group: exhausts
control: yes
"""

from __future__ import annotations

import json
from pathlib import Path


def submit(folder: Path, released: Path) -> None:
    notebook = json.loads(released.read_text())
    text = {"output_type": "stream", "name": "stdout", "text": "ha" * 6 * 10**6}
    next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")["outputs"] = [text]
    (folder / released.name).write_text(json.dumps(notebook))

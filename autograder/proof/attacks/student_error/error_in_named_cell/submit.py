"""An error in a cell whose name is a script; the line that a verdict points at is text.

group: reaches
functions: shard_params
control: yes
"""

from __future__ import annotations

import json
from pathlib import Path


def submit(folder: Path, released: Path) -> None:
    notebook = json.loads(released.read_text())
    notebook["cells"][3]["source"] = ""
    name = "<script>document.title='run'</script>\x1b[31m"
    code = {"cell_type": "code", "outputs": [], "execution_count": None, "metadata": {"nbgrader": {"grade_id": name}}}
    notebook["cells"].insert(
        3, {**code, "id": name, "source": "def shard_params(params, axis_name, min_size):\n    1 / 0"}
    )
    (folder / released.name).write_text(json.dumps(notebook))

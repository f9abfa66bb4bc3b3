"""Scripts and escapes as ids and grade ids of cells, as names of the grader's own metadata, and in their text.

group: reaches
functions: shard_params
control: yes
"""

from __future__ import annotations

import json
from pathlib import Path


def submit(folder: Path, released: Path) -> None:
    notebook = json.loads(released.read_text())
    name = "x' onclick='alert(1)' \"><script>document.title='run'</script>\x1b[31m"
    code = {"cell_type": "code", "outputs": [], "execution_count": None, "source": "x = 1"}
    notebook["cells"] += [
        {**code, "id": name, "metadata": {}},
        {**code, "id": "a", "metadata": {"nbgrader": {"grade_id": name, "grade": True, "points": 3}}},
        {**code, "id": "b", "metadata": {"meshcraft": {"name": name}}},
        {"cell_type": name, "id": "c", "metadata": {}, "source": name},
    ]
    (folder / released.name).write_text(json.dumps(notebook))

"""Ships numpy.py, jax.py, sitecustomize.py and a package autograder beside the notebook. Only the notebook is read.

group: forges
functions: shard_params
control: yes
"""

import json

GENEROUS = "def check(function, **_):\n    return 2.0\n"


def submit(folder, released):
    notebook = json.loads(released.read_text())
    for cell in notebook["cells"]:
        if cell["metadata"].get("nbgrader", {}).get("grade_id") == "shard_params":
            cell["source"] = "def shard_params(params, axis_name, min_size):\n    return {}, {}"
    (folder / released.name).write_text(json.dumps(notebook))
    package = folder / "autograder"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "check.py").write_text(GENEROUS)
    (folder / "sitecustomize.py").write_text("raise SystemExit(0)\n")
    for name in ("numpy.testing", "jaxlib", "course"):
        (folder / f"{name}_.py").write_text("raise SystemExit(0)\n")

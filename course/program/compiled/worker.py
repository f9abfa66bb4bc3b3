"""The process in which the GPU compiler runs: Programs in, schedules and memory out. Started only by ``compiled``.

Usage: ``python -m course.program.compiled.worker FOLDER``. ``request.json`` in the folder is the request, Program
``i`` is ``i.program``; ``i.hlo`` and ``result.json`` are the response.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from course.program.audit import audit
from course.program.program import Program, ProgramError
from course.program.run import lowered


def main(folder: Path) -> None:
    """Compile every Program of the request."""
    request = json.loads((folder / "request.json").read_text())
    results = [_answer(folder, index, request) for index in range(request["programs"])]
    versions = {"jax": jax.__version__, "plugin": version(request["plugin"])}
    (folder / "result.json").write_text(json.dumps({"versions": versions, "results": results}))


def _answer(folder: Path, index: int, request: dict[str, Any]) -> dict[str, Any]:
    try:
        program = Program.load((folder / f"{index}.program").read_bytes(), limit=None)
        compiled = _compile(program, request)
        (folder / f"{index}.hlo").write_text(compiled.as_text() or "")
        memory = compiled.memory_analysis()
    except ProgramError as error:
        return {"error": str(error)}
    except Exception as error:  # any part of the compiler may raise its own exception type
        return {"error": f"{type(error).__name__}: {str(error)[:600]}"}
    names = {"temporaries": "temp", "arguments": "argument", "outputs": "output", "aliased": "alias"}
    names["code"] = "generated_code"
    return {name: getattr(memory, f"{prefix}_size_in_bytes") for name, prefix in names.items()}


def _compile(program: Program, request: dict[str, Any]) -> jax.stages.Compiled:
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=request["target_config"], topology=f"1x1x{program.num_devices}"
    )
    mesh = Mesh(np.array(topology.devices).reshape(tuple(program.mesh.values())), tuple(program.mesh))
    return lowered(program, audit(program, lenient=request["lenient"]).exported, mesh).compile(
        compiler_options=request["flags"]
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))

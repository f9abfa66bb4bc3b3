"""A fresh process for every measurement, so that nothing earlier affects its peak memory or its caches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class MeasurementFailed(Exception):
    """Raised when nothing was measured; the message says why.

    Attributes:
        kind: ``out of memory``, ``time`` or ``fault``.
    """

    def __init__(self, message: str, kind: str = "fault"):
        super().__init__(message)
        self.kind = kind


def ask(
    request: dict[str, Any],
    files: dict[str, bytes] | None = None,
    *,
    module: str = "course.measured.worker",
    seconds: float = 300,
    platform: str = "",
    flags: str = "",
) -> dict[str, Any]:
    """Send a request to a fresh process and return its response.

    Args:
        request: JSON; the worker adds ``folder``, the location of ``files``.
        files: Programs by file name.
        module: The worker to run.
        seconds: Time limit, after which the process is ended.
        platform: ``cpu`` restricts it to emulated devices, for tests; otherwise it takes the best devices available.
        flags: Added to ``XLA_FLAGS``.

    Raises:
        MeasurementFailed: It ended without a response, took too long, or reported an error.
    """
    if seconds <= 0:
        raise MeasurementFailed("there was no time left", "time")
    with tempfile.TemporaryDirectory() as folder:
        for name, data in (files or {}).items():
            (Path(folder) / name).write_bytes(data)
        (Path(folder) / "request.json").write_text(json.dumps({**request, "folder": folder}))
        command = [sys.executable, "-m", module, folder]
        try:
            variables, devnull = environment(platform, flags), subprocess.DEVNULL
            run = subprocess.run(
                command, env=variables, cwd=ROOT, stdin=devnull, stdout=devnull, stderr=subprocess.PIPE, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            raise MeasurementFailed(f"it took longer than {seconds:.0f} s and was ended", "time") from None
        answer = Path(folder) / "answer.json"
        if not answer.exists():
            last = (run.stderr.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
            raise MeasurementFailed(f"the process ended with status {run.returncode}: {last[:300]}")
        response = json.loads(answer.read_text())
    if "error" in response:
        raise MeasurementFailed(response["error"], response["kind"])
    return response


def serve(folder: str, answer: Any) -> None:
    """In the worker: respond to the request in ``folder`` with ``answer(request)``, or report the error."""
    request = json.loads((Path(folder) / "request.json").read_text())
    try:
        response = answer(request)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".split("\n")[0][:500]
        memory = "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()
        response = {"error": text, "kind": "out of memory" if memory else "fault"}
    (Path(folder) / "answer.json").write_text(json.dumps(response))


def environment(platform: str = "", flags: str = "") -> dict[str, str]:
    """Environment variables of a measuring process; ``platform`` and ``flags`` as for ``ask``."""
    variables = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "MESHCRAFT_MESH")}
    # Allocate memory on demand, so that the peak is the program's and two processes can follow each other.
    variables |= {"PYTHONPATH": str(ROOT), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    variables |= {"JAX_PLATFORMS": "cpu"} if platform == "cpu" else {"MESHCRAFT_MESH": "real"}
    xla_flags = " ".join(part for part in (variables.get("XLA_FLAGS", ""), flags) if part)
    return {**variables, "XLA_FLAGS": xla_flags} if xla_flags else variables

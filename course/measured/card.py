"""The card attached to every measurement: devices, versions, flags and date."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.extend.backend import get_backend

from course.files import write_atomically

_PACKAGES = re.compile(r"jax|jaxlib|jax[-_](cuda|rocm).*|nvidia[-_](cublas|cudnn|nccl|cuda[-_](nvcc|runtime|cupti)).*")
_CLIENT = tuple(f"XLA_PYTHON_CLIENT_{suffix}" for suffix in ("PREALLOCATE", "MEM_FRACTION", "ALLOCATOR"))
_FLAGS = ("XLA_FLAGS", *_CLIENT, "NVIDIA_TF32_OVERRIDE", "JAX_DEFAULT_MATMUL_PRECISION")
_NVIDIA = ("driver_version", "power.limit", "clocks.max.sm", "clocks.max.mem")


def card() -> dict[str, Any]:
    """Describe the devices and the installation that this process would measure on. Starts JAX's backend.

    Returns:
        ``platform`` (``gpu``, ``cpu``), ``kind`` and ``count`` of its devices, their ``memory`` in bytes if the backend
        reports it, ``backend`` (its version, with CUDA's), ``driver`` (from nvidia-smi, if available), ``versions``,
        ``flags`` and ``date``.
    """
    devices = jax.devices()
    return {
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "count": len(devices),
        "memory": (devices[0].memory_stats() or {}).get("bytes_limit"),
        "backend": str(get_backend().platform_version).strip(),
        "driver": _driver(),
        **installation(),
    }


def installation() -> dict[str, Any]:
    """``versions``, ``flags`` and ``date``: the part of a card that needs no device."""
    return {
        "versions": {"python": platform.python_version(), **_versions()},
        "flags": flags(os.environ),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def in_words(installed: dict[str, Any]) -> dict[str, str]:
    """The lines of a card that describe what ``installation`` returns."""
    listed = ", ".join(f"{package} {installed['versions'][package]}" for package in ("jax", "jaxlib", "python"))
    set_to = ", ".join(f"{flag}={value}" for flag, value in installed["flags"].items()) or "none"
    return {"installation": f"{listed}; {installed['date']}", "flags": set_to}


def write(path: Path, data: dict[str, Any]) -> None:
    """Write the card atomically."""
    write_atomically(path, json.dumps(data, indent=1) + "\n")


def flags(environment: Any) -> dict[str, str]:
    """The settings in ``environment`` that change measurements; paths in them are replaced by ``PATH``."""
    return {name: re.sub(r"=\S*/\S*", "=PATH", environment[name]) for name in _FLAGS if environment.get(name)}


def file_name(kind: str) -> str:
    """File name for a kind of device: ``nvidia-h100-80gb-hbm3.json``."""
    return re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-") + ".json"


def _versions() -> dict[str, str]:
    installed = {str(d.metadata["Name"]): d.version for d in metadata.distributions() if d.metadata["Name"]}
    return {name: installed[name] for name in sorted(installed) if _PACKAGES.fullmatch(name)}


def _driver() -> dict[str, str]:
    """Driver version and limits of the first GPU; empty if nvidia-smi is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, f"--query-gpu={','.join(_NVIDIA)}", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in (output.splitlines() or [""])[0].split(",")]
    return dict(zip(_NVIDIA, values, strict=False))

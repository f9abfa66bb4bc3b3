"""Compile Programs in a separate process, and keep a summary of the result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from course.machine import Machine
from course.program.compiled.collectives import GpuCollective, collectives
from course.program.compiled.plugin import PACKAGES, Plugin, find_plugin
from course.program.compiled.replay import Replay, replay
from course.program.compiled.schedule import Schedule, parse_schedule
from course.program.compiled.target import target_config
from course.program.program import Program, ProgramError

# Without it XLA merges the chunks' products of a ring into one and destroys the overlap.
DEFAULT_FLAGS: Mapping[str, int | bool | str] = {"xla_gpu_dot_merger_threshold_mb": 0}
TIME_LIMIT = 300.0
_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class GpuMemory:
    """Bytes on one GPU, as the compiler assigned its buffers.

    Attributes:
        temporaries: Everything except inputs and outputs.
        arguments: Resident bytes of the inputs.
        outputs: Resident bytes of the outputs, including those that reuse a donated input.
        aliased: The part of the outputs that reuses donated inputs.
        code: Bytes of kernel code; 0 if the compiler does not report it.
    """

    temporaries: int
    arguments: int
    outputs: int
    aliased: int
    code: int

    @property
    def peak(self) -> int:
        return self.temporaries + self.arguments + self.outputs - self.aliased


@dataclass(frozen=True)
class GpuReport:
    """A Program as compiled by the GPU compiler.

    Attributes:
        machine: The machine whose GPUs it was compiled for.
        mesh: Axis sizes by name.
        flags: The compiler options used.
        versions: Versions of ``jax`` and of the compiler's ``plugin``.
        memory: Memory of one GPU.
        collectives: In scheduled order, equal ones counted together.
        replay: The schedule's time on the machine.
        schedule: The compiled program; not part of the JSON.
    """

    machine: str
    mesh: dict[str, int]
    flags: dict[str, int | bool | str]
    versions: dict[str, str]
    memory: GpuMemory
    collectives: tuple[GpuCollective, ...]
    replay: Replay
    schedule: Schedule | None = None

    @property
    def coverage(self) -> float | None:
        """The fraction of collectives, weighted by trips, that span a matmul; None without collectives."""
        return _coverage(self.collectives)

    @property
    def coverage_in_loops(self) -> float | None:
        """The same fraction for collectives in loops."""
        return _coverage([c for c in self.collectives if c.in_loop])

    def to_json(self) -> dict[str, Any]:
        """Everything but the schedule and the replay's bars."""
        data = msgspec.to_builtins(replace(self, schedule=None, replay=replace(self.replay, bars=())))
        del data["schedule"], data["replay"]["bars"]
        return {**data, "mesh": list(self.mesh.items())}


def compile_for(
    program: Program,
    machine: Machine,
    flags: Mapping[str, int | bool | str] = DEFAULT_FLAGS,
    *,
    time_limit: float = TIME_LIMIT,
    lenient: bool = False,
) -> GpuReport:
    """Compile one Program; see ``compile_all``."""
    return compile_all([program], machine, flags, time_limit=time_limit, lenient=lenient)[0]


def compile_all(
    programs: Sequence[Program],
    machine: Machine,
    flags: Mapping[str, int | bool | str] = DEFAULT_FLAGS,
    *,
    time_limit: float = TIME_LIMIT,
    lenient: bool = False,
) -> list[GpuReport]:
    """Compile Programs for a machine's GPUs, in one new process that ends afterwards.

    Args:
        programs: Exported with ``platform="cuda"``.
        machine: A GPU machine with at least as many devices as each mesh.
        flags: Compiler options, ``xla_gpu_...``.
        time_limit: Time limit in seconds for all of them together.
        lenient: Whether they may contain any operations, as for ``audit``.

    Raises:
        AotMissing: The extra ``aot`` is not installed, is for another jax, or has no wheel for this platform.
        ProgramError: A Program was exported for CPUs, does not fit the machine or cannot be compiled; a flag does
            not exist; the time limit is exceeded.
    """
    for program in programs:
        _check(program, machine)
    target = target_config(machine)
    plugin = find_plugin()
    with tempfile.TemporaryDirectory(prefix="meshcraft-") as name:
        folder = Path(name)
        for index, program in enumerate(programs):
            (folder / f"{index}.program").write_bytes(program.serialise())
        request = {"programs": len(programs), "target_config": target, "flags": dict(flags), "plugin": PACKAGES[0]}
        request["lenient"] = lenient
        (folder / "request.json").write_text(json.dumps(request))
        _run_worker(folder, plugin, time_limit)
        answer = json.loads((folder / "result.json").read_text())
        return [
            _report(program, machine, flags, answer["versions"], result, folder / f"{index}.hlo")
            for index, (program, result) in enumerate(zip(programs, answer["results"], strict=True))
        ]


def _check(program: Program, machine: Machine) -> None:
    if program.platform != "cuda":
        raise ProgramError(
            f"the compiled analysis needs a GPU Program; this one is for {program.platform}: "
            'export it with platform="cuda"'
        )
    if program.num_devices > machine.num_devices:
        raise ProgramError(
            f"mesh {program.mesh} needs {program.num_devices} devices and {machine.name} has {machine.num_devices}"
        )


def _run_worker(folder: Path, plugin: Plugin, time_limit: float) -> None:
    """Run one worker process on ``folder``: no GPU, no inherited environment, nothing on our stderr."""
    path = [str(_ROOT), *([str(plugin.folder)] if plugin.folder else [])]
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "MESHCRAFT_MESH": "real",  # enables the plugin; the next two keep it from starting a GPU
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "course.program.compiled.worker", str(folder)]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace", timeout=time_limit
        )
    except subprocess.TimeoutExpired:
        raise ProgramError(
            f"the GPU compiler was stopped after {time_limit:g} seconds; give it more (time_limit), "
            "or a program that scans over its layers"
        ) from None
    if done.returncode or not (folder / "result.json").exists():
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no output")
        raise ProgramError(f"the GPU compiler's process ended with status {done.returncode}: {last[:500]}")


def _report(
    program: Program,
    machine: Machine,
    flags: Mapping[str, int | bool | str],
    versions: dict[str, str],
    result: dict[str, Any],
    hlo: Path,
) -> GpuReport:
    if "error" in result:
        unknown = "No such compile option" in result["error"] or "Unknown flag" in result["error"]
        advice = f"; the flags were {', '.join(flags)}: take out the one that this XLA does not know" if unknown else ""
        raise ProgramError(f"the GPU compiler refused the program: {result['error']}{advice}")
    schedule = parse_schedule(hlo.read_text())
    return GpuReport(
        machine.name,
        dict(program.mesh),
        dict(flags),
        versions,
        GpuMemory(**result),
        collectives(schedule, program.mesh),
        replay(schedule, program.mesh, machine),
        schedule,
    )


def _coverage(gpu_collectives: Sequence[GpuCollective]) -> float | None:
    total = sum(c.count for c in gpu_collectives)
    return sum(c.count for c in gpu_collectives if c.spans_matmul) / total if total else None

"""XLA's partitioning of a Program whose work is not all inside one ``shard_map``: the module that one device runs.

If shardings are left to the compiler (``jit`` with ``NamedSharding``, ``with_sharding_constraint``, explicit meshes,
work between two ``shard_map``s), XLA's partitioner decides which device computes and sends what. It runs for emulated
CPU devices, in a process that ends as soon as the module is partitioned: later passes are specific to the CPU.

The process is ``python -m course.program.partition FOLDER``: it reads ``program`` in the folder, and responds with
``partitioned`` and ``answer.json``.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from functools import lru_cache
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from course.program.program import Program, ProgramError, Spec

TIME_LIMIT = 300.0
MAX_EMULATED = 2048  # XLA:CPU would treat more as another process's devices
_ROOT = Path(__file__).parents[2]
_DUMPED = "*.after_spmd-partitioning.*.hlo.pb"


class Partitioned(NamedTuple):
    """A Program as partitioned by XLA.

    Attributes:
        module: StableHLO of one device, as MLIR bytecode.
        inputs, outputs: Sharding of each input and result on the mesh.
    """

    module: bytes
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]


@lru_cache(maxsize=4)
def partitioned(program: Program, *, settle: bool = False) -> Partitioned:
    """Partition the Program with XLA.

    Args:
        program: The Program.
        settle: Whether XLA chooses the shardings of inputs that the artefact leaves open; else as in the signature.

    Raises:
        ProgramError: XLA refuses it, or it takes too long.
    """
    if program.num_devices > MAX_EMULATED:
        raise ProgramError(
            f"XLA partitions for at most {MAX_EMULATED:,} emulated devices and mesh {program.mesh} has "
            f"{program.num_devices:,}; use a smaller mesh, or write the step as one shard_map"
        )
    with tempfile.TemporaryDirectory(prefix="meshcraft-") as name:
        folder = Path(name)
        (folder / "program").write_bytes(program.serialise())
        (folder / "request.json").write_text(json.dumps({"settle": settle, "devices": program.num_devices}))
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": name,
            "TMPDIR": name,
            "PYTHONPATH": str(_ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "JAX_PLATFORMS": "cpu",
        }
        command = [sys.executable, "-m", "course.program.partition", name]
        try:
            done = subprocess.run(
                command, cwd=name, env=environment, capture_output=True, text=True, errors="replace", timeout=TIME_LIMIT
            )
        except subprocess.TimeoutExpired:
            raise ProgramError(
                f"XLA did not partition the program within {TIME_LIMIT:g} seconds; scan over its layers"
            ) from None
        answer = folder / "answer.json"
        reply: dict[str, Any] = (
            json.loads(answer.read_text()) if answer.exists() else {"error": _last_line(done.stderr)}
        )
        if "error" in reply:
            raise ProgramError(
                f"XLA cannot partition the program: {reply['error'][:400]}. State the shardings that it stumbles over "
                "(jax.lax.with_sharding_constraint), or write the step as one shard_map"
            )
        specs = [
            [spec_of_tiles(*tiles, ndim=len(leaf.shape), mesh=program.mesh)
             for tiles, leaf in zip(reply[kind], leaves, strict=True)]
            for kind, leaves in (("inputs", program.inputs), ("outputs", program.outputs))
        ]  # fmt: skip
        return Partitioned((folder / "partitioned").read_bytes(), tuple(specs[0]), tuple(specs[1]))


def spec_of_tiles(shape: list[int], devices: list[int], *, ndim: int, mesh: dict[str, int]) -> Spec:
    """The spec for an XLA sharding.

    Args:
        shape: Number of tiles in each dim; one more entry if tiles are replicated; empty if it is whole.
        devices: The device of each tile.
        ndim: Number of dims of the array.
        mesh: Axis sizes by name.

    Raises:
        ProgramError: The tiles follow no axes of the mesh.
    """
    if not shape:
        return ((),) * ndim
    places = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    tiles = np.sort(np.array(devices).reshape(*shape[:ndim], -1), axis=-1)
    names = [axis for axis, size in mesh.items() if size > 1]
    for count in range(len(names) + 1):
        for axes in permutations(names, count):
            spec = _dealt(axes, shape[:ndim], mesh)
            if spec is None:
                continue
            order = [list(mesh).index(axis) for axis in axes]
            rest = [i for i in range(len(mesh)) if i not in order]
            candidate = np.sort(np.transpose(places, order + rest).reshape(tiles.shape), axis=-1)
            if np.array_equal(candidate, tiles):
                return spec
    raise ProgramError(
        f"XLA splits an input or result of the program into {shape[:ndim]} tiles, along no axes of mesh {mesh}; state "
        "its sharding (in_shardings, out_shardings)"
    )


def _dealt(axes: tuple[str, ...], tiles: list[int], mesh: dict[str, int]) -> Spec | None:
    """Assign the axes, in order, to dims so that each has this many tiles; None if that is impossible."""
    left, spec = list(axes), []
    for count in tiles:
        own: list[str] = []
        while math.prod(mesh[axis] for axis in own) < count and left:
            own.append(left.pop(0))
        if math.prod(mesh[axis] for axis in own) != count:
            return None
        spec.append(tuple(own))
    return None if left else tuple(spec)


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "its process ended silently")


def main(folder: Path) -> None:
    """Entry point of the process: partition the Program in the folder, and end."""
    from course.mesh import emulate_devices, make_mesh

    request = json.loads((folder / "request.json").read_text())
    emulate_devices(request["devices"])
    dumped = folder / "dumped"
    threading.Thread(target=_end_when_dumped, args=(folder, dumped), daemon=True).start()
    try:
        import jax

        from course.program.audit import audit
        from course.program.run import lowered

        program = Program.load((folder / "program").read_bytes(), limit=None)
        # The platform does not matter: no CPU code is generated.
        exported = replace(audit(program, lenient=True).exported, platforms=("cpu",))
        mesh = make_mesh(program.mesh)
        declared = exported.in_shardings_jax(mesh)
        free = [i for i, sharding in enumerate(declared) if sharding is None] if request["settle"] else []
        flags = {"xla_dump_to": str(dumped), "xla_dump_hlo_pass_re": "spmd-partitioning", "xla_dump_hlo_as_proto": True}
        with jax.set_mesh(mesh):  # for programs without shardings on any input
            lowered(program, exported, mesh, free).compile(compiler_options=flags)
        _end_when_dumped(folder, dumped)
    except Exception as error:  # any part of the compiler may raise its own exception type
        problem = error if isinstance(error, ProgramError) else f"{type(error).__name__}: {error}"
        _end(folder, {"error": " ".join(str(problem).split())[:600]})


def _end_when_dumped(folder: Path, dumped: Path) -> None:
    """Wait for the partitioned module, write the response and end the process."""
    from jaxlib import _hlo, _jax  # type: ignore[attr-defined]

    while True:
        time.sleep(0.05)
        for path in dumped.glob(_DUMPED):
            try:
                data = _module_of(path.read_bytes())
                module = _hlo.HloModule.from_serialized_hlo_module_proto(data)
            except (IndexError, ValueError, RuntimeError):  # it is not completely written yet
                continue
            try:
                (folder / "partitioned").write_bytes(_jax.mlir.hlo_to_stablehlo(data))
                outputs = module.spmd_output_sharding
                outputs = outputs.tuple_shardings if outputs.tuple_shardings else [outputs]
                answer = {"inputs": module.spmd_parameters_shardings, "outputs": outputs}
                _end(folder, {name: [_tiles(sharding) for sharding in shardings] for name, shardings in answer.items()})
            except Exception as error:
                _end(folder, {"error": f"{type(error).__name__}: {error}"[:600]})


_ONCE = threading.Lock()


def _end(folder: Path, answer: dict[str, Any]) -> None:
    with _ONCE:  # never released: the process ends while holding it
        (folder / "answer.json").write_text(json.dumps(answer))
        os._exit(0)


def _tiles(sharding: Any) -> tuple[list[int], list[int]]:
    """Shape and devices of an ``OpSharding``'s tiles; empty if the array is replicated everywhere."""
    from jaxlib import _hlo  # type: ignore[attr-defined]

    hlo_sharding = _hlo.HloSharding.from_proto(sharding)
    if not hlo_sharding.is_tiled():
        return [], []
    return list(hlo_sharding.tile_assignment_dimensions()), list(hlo_sharding.tile_assignment_devices())


def _module_of(data: bytes) -> bytes:
    """The ``HloModuleProto`` of an ``HloProto``: its first field.

    Raises:
        IndexError: The data is incomplete.
    """
    size, place = 0, 1
    while True:
        size |= (data[place] & 127) << 7 * (place - 1)
        place += 1
        if data[place - 1] < 128:
            break
    if len(data) < place + size:
        raise IndexError("cut off")
    return data[place : place + size]


if __name__ == "__main__":
    main(Path(sys.argv[1]))

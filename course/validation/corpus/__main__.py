"""``python -m course.validation.corpus``: every program in a process of its own, and the table of what came out."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from course.validation.corpus.programs import ENTRIES, Entry

RESULTS = Path(__file__).parent / "results.json"
MACHINE, TIME_LIMIT = "8xH100", 900
_PACKAGES = ("jax", "jaxlib", "flax", "optax")


@dataclass(frozen=True)
class Row:
    """What came out for a program.

    Attributes:
        name, repository, commit, path, function, style: Which it is.
        refused: The sentence, where it has no price; empty where it was accepted.
        devices: That it is for.
        operations: As written.
        flops, xla_flops: Of a device, each loop's body once: ours, and those of XLA's own cost analysis.
        temporaries, compiled_temporaries: Bytes: by liveness, and as the deviceless GPU compiler assigned them.
        seconds, replayed: Of a step: the timeline's, and that compiler's schedule replayed.
        compiled_reason: Why there is nothing of that compiler.
    """

    name: str
    repository: str
    commit: str
    path: str
    function: str
    style: str
    refused: str = ""
    devices: int = 0
    operations: int = 0
    flops: float = 0.0
    xla_flops: float = 0.0
    temporaries: int = 0
    compiled_temporaries: int | None = None
    seconds: float = 0.0
    replayed: float | None = None
    compiled_reason: str = ""


def judged(entry: Entry, folder: Path, aot: bool) -> dict[str, Any]:
    """What the analyses say of a program, beside XLA."""
    from course.predict import predict
    from course.program import ProgramError, capture, parse

    function, args = entry.make(folder / entry.repository.partition("/")[2])
    try:
        program = capture(function, args)
        module = parse(program, data_branches=True, lenient=True)
        gpu = capture(function, args, platform="cuda") if aot else None
        found = predict(program, MACHINE, aot=aot, gpu_program=gpu)
    except ProgramError as error:
        return {"refused": str(error)}
    ours, theirs = once(module.main), xla_flops(program)
    compiled = found.compiled
    return {
        "refused": found.refused,
        "devices": program.num_devices,
        "operations": found.costs.operations,
        "flops": ours,
        "xla_flops": theirs,
        "temporaries": found.memory.temporaries,
        "compiled_temporaries": compiled and compiled.memory.temporaries,
        "seconds": found.timeline.seconds,
        "replayed": compiled and compiled.replay.seconds,
        "compiled_reason": found.compiled_reason,
    }


def once(main: Any) -> float:
    """Operations of a program with every loop's body counted once, as XLA's cost analysis does it."""
    from course.program.costs import dot_flops, elementwise_operations, reduce_operations
    from course.program.ir import ELEMENTWISE

    total = 0.0
    for op in main.ops:
        if op.kind == "dot_general":
            total += dot_flops(op)
        elif op.kind in ELEMENTWISE:
            total += elementwise_operations(op)
        elif op.kind in ("reduce", "reduce_window"):
            total += reduce_operations(op)
        elif op.kind == "while":
            total += sum(map(once, op.regions))
        elif op.kind == "case":
            total += max(map(once, op.regions))
    return total


def xla_flops(program: Any) -> float:
    """The same by XLA's ``HloCostAnalysis``, transcendental functions included, of what one device runs."""
    import jax
    from jax.extend.mlir import ir
    from jax.interpreters.mlir import make_ir_context
    from jaxlib import _jax

    from course.program.audit import audit
    from course.program.foreign import rows_of_axes
    from course.program.partition import partitioned

    data = (
        partitioned(program).module if program.num_devices > 1 else audit(program, lenient=True).exported.mlir_module()
    )
    with make_ir_context():
        text = ir.Module.parse(data).operation.get_asm(enable_debug_info=False)
    meshes = dict(re.findall(r"sdy\.mesh @(\w+) = (<.*>)", text))
    text = re.sub(  # the way back knows of no groups by axes
        r"#stablehlo\.replica_group_mesh_axes<.*?\]>",
        lambda found: _dense(rows_of_axes(found[0], meshes).tolist()),
        text,
    )
    module = _jax.mlir.mlir_module_to_xla_computation(text, use_tuple_args=False, return_tuple=False).get_hlo_module()
    counted = _jax.hlo_module_cost_analysis(jax.devices()[0].client, module)
    return float(counted.get("flops", 0.0) + counted.get("transcendentals", 0.0))


def _dense(rows: list[list[int]]) -> str:
    return f"dense<{rows}> : tensor<{len(rows)}x{len(rows[0])}xi64>"


def rows(folder: Path, names: list[str], aot: bool) -> Iterator[Row]:
    """Each program in a process of its own: some set a mesh for good, and modules have the same names."""
    for entry in ENTRIES:
        if names and not any(name in entry.name for name in names):
            continue
        command = [sys.executable, "-m", "course.validation.corpus", str(folder), "--one", entry.name]
        command += [] if aot else ["--no-aot"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT)
            last = done.stdout.strip().splitlines()[-1:] if not done.returncode else []
            said = json.loads(last[0]) if last else {"refused": "FAILED: " + done.stderr.strip()[-600:]}
        except subprocess.TimeoutExpired:
            said = {"refused": f"FAILED: not done after {TIME_LIMIT} seconds"}
        about = {key: value for key, value in asdict_entry(entry).items()}
        yield Row(**about, **said)


def asdict_entry(entry: Entry) -> dict[str, str]:
    """What a row says of its program."""
    fields = ("name", "repository", "commit", "path", "function", "style")
    return {field: getattr(entry, field) for field in fields}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m course.validation.corpus", description=__doc__)
    parser.add_argument("folder", type=Path, help="a checkout of each repository, named as the repository is")
    parser.add_argument("names", nargs="*", help="only programs whose names contain one of these")
    parser.add_argument("--no-aot", action="store_true", help="leave the GPU compiler out")
    parser.add_argument("--write", action="store_true", help="keep these rows in results.json, in place of older ones")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        entry = next(entry for entry in ENTRIES if entry.name == options.one)
        print(json.dumps(judged(entry, options.folder, not options.no_aot)))
        return 0
    for row in rows(options.folder, options.names, not options.no_aot):
        print(shown(row), flush=True)
        if options.write:
            keep(row)
    return 0


def shown(row: Row) -> str:
    """A row as one line."""
    if row.refused and not row.seconds:
        return f"{row.name}: REFUSED {row.refused}"
    figures = [f"{row.devices} devices", f"FLOPs {row.flops / max(row.xla_flops, 1) - 1:+.2%}"]
    if row.compiled_temporaries is not None and row.replayed is not None:
        figures.append(f"temporaries {row.temporaries / 2**20:.1f} / {row.compiled_temporaries / 2**20:.1f} MiB")
        figures.append(f"time {row.seconds * 1e3:.3f} / {row.replayed * 1e3:.3f} ms")
        figures.append(
            f"{row.temporaries / max(1, row.compiled_temporaries) - 1:+.1%} {row.seconds / row.replayed - 1:+.1%}"
        )
    else:
        figures.append(f"{row.temporaries / 2**20:.1f} MiB, {row.seconds * 1e3:.3f} ms; {row.compiled_reason}")
    return f"{row.name}: {', '.join(figures)} {row.refused}"


def keep(row: Row) -> None:
    """Put a row into the table in place of its older one."""
    found = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    by_name = {old["name"]: old for old in found} | {row.name: asdict(row)}
    ordered = [by_name[entry.name] for entry in ENTRIES if entry.name in by_name]
    versions = {name: version(name) for name in _PACKAGES}
    RESULTS.write_text(json.dumps({"versions": versions, "machine": MACHINE, "rows": ordered}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())

"""``python -m course.validation.corpus``: every program in its own process, and the table of results."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from course.validation.corpus.programs import ENTRIES, Entry
from course.validation.corpus.record import MACHINE, Row, keep

TIME_LIMIT = 900


def judged(entry: Entry, folder: Path, aot: bool) -> dict[str, Any]:
    """Results of the analyses for a program, compared with XLA."""
    from course.predict import predict
    from course.program import ProgramError, capture, parse

    function, args = entry.make(folder / entry.repository.partition("/")[2])
    try:
        program, gpu = capture(function, args), capture(function, args, platform="cuda")
        module = parse(gpu, data_branches=True, lenient=True)  # on CPUs, random bits are a loop, which XLA counts once
        found = predict(program, MACHINE, aot=aot, gpu_program=gpu)
    except ProgramError as error:
        return {"refused": str(error)}
    ours, theirs = once(module.main), xla_flops(gpu)
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
    """Operations of a program with every loop's body counted once, as in XLA's cost analysis."""
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
    """The same by XLA's ``HloCostAnalysis``, including transcendental functions, for one device's program."""
    import jax
    from jax.extend.mlir import ir
    from jax.interpreters.mlir import make_ir_context
    from jaxlib import _jax  # type: ignore[attr-defined]

    from course.program.audit import audit
    from course.program.foreign import rows_of_axes
    from course.program.partition import partitioned

    data = (
        partitioned(program).module if program.num_devices > 1 else audit(program, lenient=True).exported.mlir_module()
    )
    with make_ir_context():
        text = str(ir.Module.parse(data).operation.get_asm(enable_debug_info=False))
    meshes = dict(re.findall(r"sdy\.mesh @(\w+) = (<.*>)", text))
    text = re.sub(  # the conversion back does not support groups by axes
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
    """Run each program in its own process: some set a mesh for good, and modules share names."""
    for entry in ENTRIES:
        if names and not any(name in entry.name for name in names):
            continue
        command = [sys.executable, "-m", "course.validation.corpus", str(folder), "--one", entry.name]
        command += [] if aot else ["--no-aot"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT)
            last = done.stdout.strip().splitlines()[-1:] if not done.returncode else []
            result: dict[str, Any] = (
                json.loads(last[0]) if last else {"refused": "FAILED: " + done.stderr.strip()[-600:]}
            )
        except subprocess.TimeoutExpired:
            result = {"refused": f"FAILED: not done after {TIME_LIMIT} seconds"}
        about: dict[str, Any] = {
            field: getattr(entry, field) for field in ("name", *Entry.__dataclass_fields__) if field != "make"
        }
        yield Row(**about, **result)


def main() -> int:
    """Entry point of the command."""
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
            keep(row, [entry.name for entry in ENTRIES])
    return 0


def shown(row: Row) -> str:
    """A row as one line."""
    if not row.accepted:
        return f"{row.name}: REFUSED {row.refused}"
    figures = [f"{row.devices} devices, FLOPs {row.flops_error:+.2%}"]
    for what, error in (("temporaries", row.memory_error), ("time", row.time_error)):
        figures.append(f"{what} {error:+.1%}" if error is not None else f"{what} not measured")
    figures.append(f"{row.temporaries / 2**20:.1f} MiB, {1e3 * row.seconds:.3f} ms")
    return f"{row.name}: {', '.join(figures)} {row.refused or row.compiled_reason[:200]}"


if __name__ == "__main__":
    sys.exit(main())

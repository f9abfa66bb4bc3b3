"""What XLA's compiler for GPUs makes of the products and of an MLP's two passes, with its merge pass off and on.

It needs the extra ``aot``. Where that is not installed it prints what it gave where it was.
"""

import sys
from pathlib import Path

import jax.numpy as jnp
from async_tensor_parallel_passes import SHOWN as PASSES
from async_tensor_parallel_passes import TASK
from async_tensor_parallel_witnesses import MACHINE, MIB, US, WAYS, exported

from autograder.contract.task import trace
from course.program.compiled import DEFAULT_FLAGS, AotMissing, GpuReport, compile_all

MERGED = ("ring, a Python loop", "ring, a scan")


def row(name: str, report: GpuReport) -> str:
    beside, every = sum(c.count for c in report.collectives if c.spans_matmul), sum(c.count for c in report.collectives)
    return (
        f"{name:36}{f'{beside} of {every}':>18}{report.replay.seconds / US:14.1f}"
        f"{sum(report.replay.exposed.values()) / US:13.1f}{report.memory.temporaries / MIB:11.2f}"
    )


def main() -> None:
    assert TASK.at_scale
    case = TASK.at_scale[0]
    programs = {name: exported(function, platform="cuda") for name, function in WAYS.items()}
    passes = {name: trace(TASK, function, case, lambda _: None, "cuda") for name, function in PASSES.items()}
    precise = [exported(WAYS[name], dtype=jnp.float32, platform="cuda") for name in MERGED]
    reports = compile_all([*programs.values(), *precise, *passes.values()], MACHINE, DEFAULT_FLAGS, time_limit=1800)
    merged = compile_all([programs[name] for name in MERGED], MACHINE, {}, time_limit=1800)
    head = f"{'beside a product':>18}{'replayed, us':>14}{'exposed, us':>13}{'held, MiB':>11}"
    print(f"{'third witness: the compiler':36}{head}")
    for name, report in zip(programs, reports, strict=False):
        print(row(name, report))
    print("\nrings in float32")
    for name, report in zip(MERGED, reports[len(programs) :], strict=False):
        print(row(name, report))
    print("\nrings in bfloat16, with the merge pass left on")
    for name, report in zip(MERGED, merged, strict=True):
        print(row(name, report))
    print("\nan MLP in float32, forward and backward")
    for name, report in zip(passes, reports[-len(passes) :], strict=True):
        print(row(name, report))


if __name__ == "__main__":
    try:
        main()
    except AotMissing:
        sys.stdout.write(Path(__file__).with_suffix(".txt").read_text())

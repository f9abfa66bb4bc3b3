"""What XLA's compiler for GPUs makes of the step: how many transfers run beside a matrix product, and what it holds.

It needs the extra ``aot``. Where that is not installed it prints what it gave where it was.
"""

import sys
from pathlib import Path

from fsdp_prefetch import MACHINE, TASK, WAYS

from autograder.contract import trace
from course.program.compiled import AotMissing, compile_all

SHOWN = ("gathers when it computes", "ahead forward only", "ahead in both passes")


def main() -> None:
    assert TASK.analysed
    case = TASK.analysed[0]
    programs = [trace(TASK, WAYS[name], case, lambda _: None, "cuda") for name in SHOWN]
    reports = compile_all(programs, MACHINE)
    print(f"{'weights are gathered':26}{'beside a product':>18}{'in loops':>10}{'replayed, ms':>14}{'held, GiB':>11}")
    for name, report in zip(SHOWN, reports, strict=True):
        beside = sum(c.count for c in report.collectives if c.spans_matmul)
        every = sum(c.count for c in report.collectives)
        print(
            f"{name:26}{f'{beside} of {every}':>18}{report.coverage_in_loops:10.2f}"
            f"{1e3 * report.replay.seconds:14.2f}{report.memory.temporaries / 2**30:11.2f}"
        )
    print("\nin the loops of the last one:")
    for c in reports[-1].collectives:
        if c.in_loop:
            how = "beside a product" if c.spans_matmul else "alone"
            print(f"  {c.count:3} x {c.kind.replace('_', '-'):15}{c.operand_bytes / 2**20:8.2f} MiB  {how}")


if __name__ == "__main__":
    try:
        main()
    except AotMissing:
        sys.stdout.write(Path(__file__).with_suffix(".txt").read_text())

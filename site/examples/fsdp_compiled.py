"""What XLA's compiler for GPUs makes of the step: how many transfers run beside a matrix product, and what it holds.

It needs the extra ``aot``. Where that is not installed it prints what it gave where it was.
"""

import sys
from pathlib import Path

from fsdp_prefetch import MACHINE, TASK, WAYS

from autograder.contract.task import trace
from course.program.compiled import DEFAULT_FLAGS, AotMissing, compile_all

SHOWN = ("gathers when it computes", "ahead forward only", "ahead in both passes")
BUFFERED = {**DEFAULT_FLAGS, "xla_gpu_enable_while_loop_double_buffering": True}


def main() -> None:
    assert TASK.at_scale
    case = TASK.at_scale[0]
    programs = [trace(TASK, WAYS[name], case, lambda _: None, "cuda") for name in SHOWN]
    for title, flags in (("as it is", DEFAULT_FLAGS), ("loops double-buffered", BUFFERED)):
        reports = compile_all(programs, MACHINE, flags, time_limit=1800)
        print(f"{title:26}{'matrices beside a product':>26}{'replayed, ms':>14}{'exposed, ms':>13}{'held, GiB':>11}")
        for name, report in zip(SHOWN, reports, strict=True):
            large = [c for c in report.collectives if c.operand_bytes >= 2**20]
            beside, every = sum(c.count for c in large if c.spans_matmul), sum(c.count for c in large)
            print(
                f"{name:26}{f'{beside} of {every}':>26}{1e3 * report.replay.seconds:14.2f}"
                f"{1e3 * sum(report.replay.exposed.values()):13.2f}{report.memory.temporaries / 2**30:11.2f}"
            )
        print()
    print("transfers of matrices in the loops of the last one:")
    for c in reports[-1].collectives:
        if c.in_loop and c.operand_bytes >= 2**20:
            how = "beside a product" if c.spans_matmul else "alone"
            print(f"  {c.count:3} x {c.kind.replace('_', '-'):15}{c.operand_bytes / 2**20:7.0f} MiB  {how}")


if __name__ == "__main__":
    try:
        main()
    except AotMissing:
        sys.stdout.write(Path(__file__).with_suffix(".txt").read_text())

"""The same gradients as the GPU's compiler schedules them, with and without the sum made one iteration earlier.

It needs the extra ``aot``. Where that is not installed it prints what it gave where it was.
"""

import sys
from pathlib import Path

from autograder.chapters.data_parallel.alternatives import by_summing_when_it_reduces
from autograder.chapters.data_parallel.mutants import (
    reduces_after_the_backward_pass,
    reduces_in_the_layers_own_iteration,
)
from autograder.contract.task import load, trace
from course.machines import machine
from course.program.compiled import DEFAULT_FLAGS, AotMissing, compile_all
from solutions.data_parallel import overlapped_gradients

TASK = load("data_parallel").task("overlapped_gradients")
WAYS = {
    "at the end": reduces_after_the_backward_pass,
    "in the layer's own iteration": reduces_in_the_layers_own_iteration,
    "one later, summed then": by_summing_when_it_reduces,
    "one later, summed before": overlapped_gradients,
}


def main() -> None:
    assert TASK.at_scale
    case = TASK.at_scale[0]
    programs = [trace(TASK, function, case, lambda _: None, "cuda") for function in WAYS.values()]
    reports = compile_all(programs, machine(TASK.machine), DEFAULT_FLAGS, time_limit=1800)
    print(f"{'reduced':30}{'replayed, ms':>13}{'exposed, ms':>13}{'beside a product':>18}{'temporaries, GB':>17}")
    for name, report in zip(WAYS, reports, strict=True):
        exposed = sum(report.replay.exposed.values())
        beside = sum(c.count for c in report.collectives if c.spans_matmul)
        every = sum(c.count for c in report.collectives)
        print(
            f"{name:30}{1e3 * report.replay.seconds:13.1f}{1e3 * exposed:13.1f}{f'{beside} of {every}':>18}"
            f"{report.memory.temporaries / 1e9:17.1f}"
        )
    print("\nall-reduces of the last one, as compiled:")
    for c in reports[-1].collectives:
        where = "in the loop" if c.in_loop else "outside"
        how = "beside a product" if c.spans_matmul else "alone"
        print(f"  {c.count:3} x {c.operand_bytes / 1e6:6.2f} MB  {where:12} {how}")


if __name__ == "__main__":
    try:
        main()
    except AotMissing:
        sys.stdout.write(Path(__file__).with_suffix(".txt").read_text())

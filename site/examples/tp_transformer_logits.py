"""What a device holds for the loss of 8,192 tokens with 32,000 logits each: by liveness, and by the GPU compiler.

It needs the extra ``aot``. Where that is not installed it prints what it gave where it was.
"""

import math
import sys
from pathlib import Path

from autograder.chapters.tp_transformer.mutants import gathers_logits
from autograder.contract.task import load, trace
from course.machines import machine
from course.program import memory, parse
from course.program.compiled import AotMissing, compile_all
from solutions.tp_transformer import vocab_parallel_loss

TASK = load("tp_transformer").task("vocab_parallel_loss")
WAYS = {"logits gathered": gathers_logits, "vocabulary in parts": vocab_parallel_loss}
MiB = 2**20


def main() -> None:
    assert TASK.at_scale
    case = TASK.at_scale[0]
    reports = compile_all([trace(TASK, f, case, lambda _: None, "cuda") for f in WAYS.values()], machine("8xH100"))
    every = 4 * case.sizes["rows"] * case.sizes["seq"] * case.sizes["vocab"]
    print(f"all logits: {every / MiB:,.0f} MiB; an eighth of them: {every / 8 / MiB:,.0f} MiB\n")
    print(f"{'':22}{'largest array, MiB':>20}{'temporaries, MiB':>18}{'compiled, MiB':>15}")
    for (name, function), report in zip(WAYS.items(), reports, strict=True):
        program = trace(TASK, function, case, lambda _: None)
        held = memory(parse(program), program)
        assert held.largest
        largest = 4 * math.prod(held.largest.shape)
        figures = largest, held.temporaries, report.memory.temporaries
        print(f"{name:22}{figures[0] / MiB:20,.0f}{figures[1] / MiB:18,.0f}{figures[2] / MiB:15,.0f}")


if __name__ == "__main__":
    try:
        main()
    except AotMissing:
        sys.stdout.write(Path(__file__).with_suffix(".txt").read_text())

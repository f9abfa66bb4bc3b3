"""What a pipeline's step holds at its peak, by the number of microbatches, and what it costs to hold less.

The pictures go into the folder that is named.
"""

import sys
from dataclasses import replace
from pathlib import Path

from autograder.chapters.pipeline.mutants import keeps_activations
from autograder.chapters.pipeline.step import most_bytes
from autograder.contract.task import load, trace
from course.machines import machine
from course.program import memory, parse, timeline
from course.render import memory_svg
from solutions.pipeline import pipeline_train_step

TASK = load("pipeline").task("pipeline_train_step")
WAYS = {"kept": keeps_activations, "again": pipeline_train_step}
MiB = 2**20


def main(folder: Path) -> None:
    assert TASK.analysed
    large = TASK.analysed[0]
    print("microbatches    kept, MiB  step, ms    computed again, MiB  step, ms    closed form, MiB")
    for count in (4, 8, 16, 32):
        case = replace(large, sizes={**large.sizes, "microbatches": count})
        line = f"{count:12}"
        for name, function in WAYS.items():
            program = trace(TASK, function, case, lambda _: None)
            module = parse(program)
            held = memory(module, program)
            seconds = timeline(module, machine("8xH100")).seconds
            line += f"{held.temporaries / MiB:{13 if name == 'kept' else 23}.0f}{1e3 * seconds:10.3f}"
            if count == 32:
                folder.joinpath(f"pipeline_memory_{name}.svg").write_text(memory_svg(held))
        print(f"{line}{most_bytes(case) / MiB:20.0f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

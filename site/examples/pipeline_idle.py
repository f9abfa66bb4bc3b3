"""Two ways to spend a bubble: compute garbage, or nothing. FLOPs, time and energy on 8 H100.

The pictures go into the folder that is named.
"""

import sys
from pathlib import Path

import jax
from jax import lax

from autograder.contract.task import Case, load, trace
from course.machines import machine
from course.program import costs, parse, timeline
from course.render import schedule_svg
from course.schedules import forwards, gpipe
from solutions.pipeline import execute_pipeline

TASK = load("pipeline").task("execute_pipeline")
STAGES, SIZES = 8, {"rows": 2048, "width": 4096, "backward": 1}
PICTURES = ("garbage", "nothing")
# NVIDIA H100 Tensor Core GPU datasheet: SXM, maximum thermal design power.
WATTS = 700


# --8<-- [start:skipping]
def skipping(stage, num_microbatches):
    """The same stage, which does nothing when it has nothing to do."""

    def only_real_work(x, microbatch):
        has_work = (microbatch >= 0) & (microbatch < num_microbatches)
        return lax.cond(has_work, lambda x: stage(x, microbatch), lambda x: x, x)

    return only_real_work


# --8<-- [end:skipping]


def garbage(stage, microbatches, axis_name):
    return execute_pipeline(jax.checkpoint(stage), microbatches, axis_name)


def nothing(stage, microbatches, axis_name):
    return execute_pipeline(jax.checkpoint(skipping(stage, microbatches.shape[0])), microbatches, axis_name)


def idle(stage, microbatches, axis_name):
    """Without recomputation the derivative of a branch writes down what it needs, in idle ticks too."""
    return execute_pipeline(skipping(stage, microbatches.shape[0]), microbatches, axis_name)


WAYS = {"garbage": garbage, "nothing": nothing, "nothing, all kept": idle}


def main(folder: Path) -> None:
    print("microbatches  idle stages compute   GFLOPs a stage   step, ms   computing, ms   energy, J")
    for count in (2, 8, 32):
        for name, function in WAYS.items():
            case = Case("", {"pipe": STAGES}, {**SIZES, "microbatches": count})
            module = parse(trace(TASK, function, case, lambda _: None))
            time = timeline(module, machine("8xH100"))
            busy = sum(device.busy * len(device.members) for device in time.devices)
            print(
                f"{count:12}  {name:20}{costs(module).flops / 1e9:16.1f}{1e3 * time.seconds:11.3f}"
                f"{1e3 * busy / STAGES:16.3f}{busy * WATTS:12.2f}"
            )
    for name in PICTURES:
        case = Case("", {"pipe": 4}, {**SIZES, "backward": 0, "microbatches": 4})
        time = timeline(parse(trace(TASK, WAYS[name], case, lambda _: None)), machine(TASK.machine))
        folder.joinpath(f"pipeline_idle_{name}.svg").write_text(schedule_svg(time, forwards(gpipe(4, 4))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

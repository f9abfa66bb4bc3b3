"""The looped step with its gradients averaged at the end, and a repeat at a time: on 8 A5000, and on slower networks.

The pictures go into the folder that is named.
"""

import sys
from dataclasses import replace
from pathlib import Path

from autograder.chapters.looping_pipeline.alternatives import with_a_mean_on_the_way_back
from autograder.chapters.looping_pipeline.mutants import (
    averages_after_the_backward_pass,
    averages_every_repeat_twice,
    averages_in_every_tick,
)
from autograder.contract.task import load, trace
from course.machine import Machine
from course.machines import machine
from course.program import memory, parse, timeline
from course.render import timeline_svg
from solutions.looping_pipeline import looping_train_step

TASK = load("looping_pipeline").task("looping_train_step")
A5000 = machine(TASK.machine)
WAYS = {
    "after the backward pass": averages_after_the_backward_pass,
    "in every tick": averages_in_every_tick,
    "each repeat twice": averages_every_repeat_twice,
    "each repeat, while others run": looping_train_step,
    "the same, layers in a scan": with_a_mean_on_the_way_back,
}
FIRST, LAST = "after the backward pass", "each repeat, while others run"


def located(file: str) -> str | None:
    return "looping_pipeline" if file.endswith(("looping_pipeline.py", "looping_pipeline/mutants.py")) else None


def slowed(times: float) -> Machine:
    """The same machine with so much slower links between the pairs of devices, where ``data`` runs."""
    inside, between = A5000.links
    return replace(A5000, links=(inside, replace(between, bandwidth=between.bandwidth / times)))


def main(folder: Path) -> None:
    assert TASK.analysed
    traced = {name: trace(TASK, function, TASK.analysed[0], located) for name, function in WAYS.items()}
    modules = {name: parse(program) for name, program in traced.items()}
    print(f"{'averaged over data':31}{'step, ms':>9}{'exposed over data, ms':>23}{'share':>7}{'held, GiB':>11}")
    first = None
    for name, module in modules.items():
        step, free = timeline(module, A5000), timeline(module, A5000, free=("data",))
        spent = step.seconds - free.seconds
        first = first or spent
        held = memory(module, traced[name]).temporaries
        print(f"{name:31}{1e3 * step.seconds:9.1f}{1e3 * spent:23.1f}{spent / first:7.2f}{held / 2**30:11.2f}")
    print(f"\n{'links of data slower':>20}{'at the end, ms':>16}{'a repeat at a time, ms':>24}{'saved, ms':>11}")
    for times in (1, 2, 4, 16):
        late, soon = (timeline(modules[name], slowed(times)).seconds for name in (FIRST, LAST))
        print(f"{f'{times} times':>20}{1e3 * late:16.1f}{1e3 * soon:24.1f}{1e3 * (late - soon):11.1f}")
    for place, where in (("a5000", A5000), ("slow", slowed(4))):
        for which, name in (("end", FIRST), ("repeat", LAST)):
            picture = timeline_svg(timeline(modules[name], where))
            folder.joinpath(f"looping_pipeline_sync_{place}_{which}.svg").write_text(picture)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

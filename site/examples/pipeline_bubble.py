"""A forward pass with few and many microbatches: its bubble beside the formula's, and drawn with idle stages idle.

The pictures go into the folder that is named.
"""

import sys
from pathlib import Path

from pipeline_idle import idle

from autograder.chapters.pipeline.shared import stage_seconds
from autograder.contract.task import Case, load, trace
from course.machines import machine
from course.program import bubble, parse, timeline
from course.render import schedule_svg
from course.schedules import forwards, gpipe
from solutions.pipeline import execute_pipeline

TASK = load("pipeline").task("execute_pipeline")
DRAWN = {1: "one", 4: "few", 16: "many"}


def drawn(case: Case) -> str:
    module = parse(trace(TASK, idle, case, lambda _: None))
    meant = forwards(gpipe(case.mesh["pipe"], case.sizes["microbatches"]))
    return schedule_svg(timeline(module, machine(TASK.machine)), meant)


def main(folder: Path) -> None:
    assert TASK.analysed
    sizes = TASK.analysed[0].sizes
    print("stages  microbatches  ticks   bubble on the timeline   (S-1)/(M+S-1)")
    for stages in (4, 8):
        for count in (1, 4, 8, 16, 32):
            case = Case("", {"pipe": stages}, {**sizes, "microbatches": count})
            time = timeline(parse(trace(TASK, execute_pipeline, case, lambda _: None)), machine(TASK.machine))
            found = bubble(stages * count * stage_seconds(case), stages, time.seconds)
            form = (stages - 1) / (count + stages - 1)
            print(f"{stages:6}{count:14}{time.seconds / stage_seconds(case):7.0f}{found:24.4f}{form:16.4f}")
            if stages == 4 and count in DRAWN:
                folder.joinpath(f"pipeline_bubble_{DRAWN[count]}.svg").write_text(drawn(case))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

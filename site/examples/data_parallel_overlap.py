"""Three ways to synchronise the same gradients, on a timeline: at the end, in each layer's own iteration, one later."""

import sys
from pathlib import Path

from autograder.chapters.data_parallel.mutants import (
    reduces_after_the_backward_pass,
    reduces_in_the_layers_own_iteration,
)
from autograder.contract.task import load, trace
from course.machines import machine
from course.predict import predict
from course.render import timeline_svg
from solutions.data_parallel import overlapped_gradients

TASK = load("data_parallel").task("overlapped_gradients")
WAYS = {
    "naive": ("at the end", reduces_after_the_backward_pass),
    "same": ("in the layer's own iteration", reduces_in_the_layers_own_iteration),
    "next": ("one iteration later", overlapped_gradients),
}


def located(name):
    return lambda file: name if file.endswith(("data_parallel/mutants.py", "solutions/data_parallel.py")) else None


def main(folder: Path) -> None:
    assert TASK.analysed
    print(f"{'reduced':30}{'step, ms':>10}{'busy, ms':>10}{'exposed, ms':>13}{'of naive':>10}{'sent, GB':>10}")
    naive = None
    for name, (label, function) in WAYS.items():
        found = predict(trace(TASK, function, TASK.analysed[0], located(name)), TASK.machine)
        time = found.timeline
        naive = naive or time.exposed_seconds
        sent = sum(c.total_bytes for c in found.costs.collectives)
        print(
            f"{label:30}{1e3 * time.seconds:10.1f}{1e3 * time.busy:10.1f}{1e3 * time.exposed_seconds:13.1f}"
            f"{time.exposed_seconds / naive:10.2f}{sent / 1e9:10.2f}"
        )
        (folder / f"data_parallel_overlap_{name}.svg").write_text(timeline_svg(time))
    each_way = machine(TASK.machine).bandwidth_of(tuple(range(8)))
    print(f"\n{TASK.analysed[0].name} on {TASK.machine}; a ring over all of them sends {each_way / 1e9:g} GB/s")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""A training step five ways, at the size that ``fsdp_train_step`` is judged on: where its time and its memory go.

The pictures go into the folder that is named.
"""

import sys
from pathlib import Path

from autograder.chapters.fsdp.mutants import (
    gathers_when_it_computes,
    keeps_gathered_weights_in_step,
    keeps_the_carry_of_a_checkpoint,
    prefetches_forward_only,
)
from autograder.contract.task import load
from autograder.learner.profile import look, machine_of
from course.predict import Prediction
from course.render import memory_svg, timeline_svg
from solutions.fsdp import fsdp_train_step

TASK = load("fsdp").task("fsdp_train_step")
MACHINE = machine_of(TASK, None)
WAYS = {
    "gathers when it computes": gathers_when_it_computes,
    "ahead, backward by JAX": keeps_gathered_weights_in_step,
    "ahead, JAX with checkpoint": keeps_the_carry_of_a_checkpoint,
    "ahead forward only": prefetches_forward_only,
    "ahead in both passes": fsdp_train_step,
}
PICTURES = {"gathers when it computes": "before", "ahead forward only": "half", "ahead in both passes": "after"}


def predicted(function) -> Prediction:
    found = look(TASK, function, lambda file: None, MACHINE)
    assert isinstance(found, tuple), found
    return found[0]


def transfers(found: Prediction) -> None:
    """Each kind of collective on one device: how often, how long in all, and the step's waits for it."""
    bars = [bar for bar in found.timeline.bars if bar.device == 0 and bar.stream == "data"]
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        own = [bar for bar in bars if bar.kind == kind]
        print(
            f"  {kind.replace('_', '-'):15}{len(own):4} times {1e3 * sum(b.end - b.start for b in own):8.2f} ms in all"
        )


def main(folder: Path) -> None:
    found = {name: predicted(function) for name, function in WAYS.items()}
    last = found["ahead in both passes"]
    print(f"{'weights are gathered':28}{'step, ms':>10}{'computing':>11}{'exposed':>9}{'times':>7}{'held, GiB':>11}")
    for name, one in found.items():
        time, held = one.timeline, one.memory.temporaries
        print(
            f"{name:28}{1e3 * time.seconds:10.2f}{1e3 * time.busy:11.2f}{1e3 * time.exposed_seconds:9.2f}"
            f"{time.seconds / last.timeline.seconds:7.2f}{held / 2**30:11.2f}"
        )
    print("\ngathers when it computes, on one device:")
    transfers(found["gathers when it computes"])
    for name, picture in PICTURES.items():
        folder.joinpath(f"fsdp_prefetch_{picture}.svg").write_text(timeline_svg(found[name].timeline))
    for name, picture in (("ahead, JAX with checkpoint", "kept"), ("ahead in both passes", "memory")):
        shown = memory_svg(found[name].memory, found[name].machine.memory_bytes)
        folder.joinpath(f"fsdp_prefetch_{picture}.svg").write_text(shown)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

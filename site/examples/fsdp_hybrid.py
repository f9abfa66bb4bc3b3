"""Two nodes of eight A100: the step split over all sixteen devices, and split inside a node alone."""

from dataclasses import replace

from autograder.chapters.fsdp.mutants import gathers_when_it_computes
from autograder.contract.task import Case, load, trace
from course.machines import machine
from course.predict import predict
from course.program import costs, parse
from course.render.quantities import bytes_text
from solutions.fsdp import hybrid_shard_step

NODES = machine("2x8xA100")
INSIDE, BETWEEN = NODES.links
MACHINES = {
    "an adapter for each device": NODES,
    "one adapter for each node": replace(
        NODES, links=(INSIDE, replace(BETWEEN, bandwidth=BETWEEN.bandwidth / INSIDE.group))
    ),
}
SIZES = {"width": 4096, "hidden": 16384, "num_layers": 8, "features": 2048, "rows": 2048, "min_size": 16384, "steps": 1,
         "rate": 1}  # fmt: skip
WAYS = {
    "over all 16": ("fsdp_train_step", gathers_when_it_computes, {"data": 16}),
    "inside a node": ("hybrid_shard_step", hybrid_shard_step, {"replica": 2, "data": 8}),
}


def main() -> None:
    chapter = load("fsdp")
    programs = {
        way: trace(chapter.task(name), function, Case("two nodes", mesh, SIZES), lambda _: None)
        for way, (name, function, mesh) in WAYS.items()
    }
    print(f"{'parameters split':19}{'axis':>9}{'link':>12}{'sent by a device':>18}")
    for way, program in programs.items():
        for axis, link in NODES.axis_links(program.mesh).items():
            sent = sum(c.total_bytes for c in costs(parse(program)).collectives if axis in c.axes)
            print(f"{way:19}{axis:>9}{link:>12}{bytes_text(sent):>18}")
    print(f"\n{'parameters split':19}{'between nodes':>28}{'step, ms':>10}{'exposed, ms':>13}{'held, GiB':>11}")
    for name, where in MACHINES.items():
        for way, program in programs.items():
            found = predict(program, where)
            time = 1e3 * found.timeline.seconds, 1e3 * found.timeline.exposed_seconds
            print(f"{way:19}{name:>28}{time[0]:10.1f}{time[1]:13.1f}{found.memory.peak / 2**30:11.2f}")


if __name__ == "__main__":
    main()

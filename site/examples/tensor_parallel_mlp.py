"""The MLP block of a Transformer over 8 H100, forward and backward, with different arrays on their way.

The pictures go into the folder that is named.
"""

import sys
from dataclasses import replace
from pathlib import Path

from autograder.chapters.tensor_parallel.alternatives import tp_mlp_gathered_again
from autograder.chapters.tensor_parallel.mutants import (
    all_reduces_at_the_end,
    gathers_the_hidden_features,
    gathers_the_weights,
)
from autograder.contract.task import load, trace
from course.machines import machine
from course.program import costs, memory, parse, timeline
from course.render import holdings_svg, timeline_svg
from solutions.tensor_parallel import tp_mlp

TASK = load("tensor_parallel").task("tp_mlp")
H100 = machine(TASK.machine)
WAYS = {
    "weights come to the rows": gathers_the_weights,
    "hidden features made whole": gathers_the_hidden_features,
    "all-reduce, then slice": all_reduces_at_the_end,
    "rows there, rows back": tp_mlp,
    "the same, rows gathered again": tp_mlp_gathered_again,
}
DRAWN = {"weights": "weights come to the rows", "hidden": "hidden features made whole", "rows": "rows there, rows back"}


def located(file: str) -> str | None:
    return (
        "tensor_parallel"
        if file.endswith(("tensor_parallel.py", "tensor_parallel/mutants.py", "tensor_parallel/alternatives.py"))
        else None
    )


def main(folder: Path) -> None:
    assert TASK.analysed
    case = TASK.analysed[0]
    times = {}
    print(f"{'':31}{'step, ms':>9}{'busy, ms':>10}{'exposed, ms':>13}{'sent, MiB':>11}{'held, MiB':>11}")
    for name, function in WAYS.items():
        program = trace(TASK, function, case, located)
        module = parse(program)
        times[name] = found = timeline(module, H100)
        sent = sum(c.total_bytes for c in costs(module).collectives)
        busy, exposed = found.seconds - found.exposed_seconds, found.exposed_seconds
        held = memory(module, program).temporaries
        figures = f"{1e3 * found.seconds:9.2f}{1e3 * busy:10.2f}{1e3 * exposed:13.2f}"
        print(f"{name:31}{figures}{sent / 2**20:11,.0f}{held / 2**20:11,.0f}")

    print(f"\n{'rows there, rows back':23}{'rows':>8}{'step, ms':>11}{'exposed':>9}{'weights come, ms':>18}")
    for rows in (512, 1024, 4096, 16384, 65536):
        larger = replace(case, sizes={**case.sizes, "rows": rows})
        own, weights = (timeline(parse(trace(TASK, f, larger, located)), H100) for f in (tp_mlp, gathers_the_weights))
        share = own.exposed_seconds / own.seconds
        print(f"{'':23}{rows:8,}{1e3 * own.seconds:11.2f}{share:9.0%}{1e3 * weights.seconds:18.2f}")

    for which, name in DRAWN.items():
        folder.joinpath(f"tensor_parallel_mlp_{which}.svg").write_text(timeline_svg(times[name]))
    for which, shape, spec, labels in (
        ("between", (8, 4), ("tensor", None), ("rows", "width")),
        ("inside", (8, 16), (None, "tensor"), ("rows", "hidden")),
        ("up", (4, 16), (None, "tensor"), ("width", "hidden")),
        ("down", (16, 4), ("tensor", None), ("hidden", "width")),
    ):
        drawn = holdings_svg(shape, spec, {"tensor": 4}, labels=labels, show_spec=True)
        folder.joinpath(f"tensor_parallel_mlp_{which}.svg").write_text(drawn)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""The step of ``forward_3d`` on 8 H100: gathered once for a repeat, in every tick, and kept; and its picture.

The pictures go into the folder that is named.
"""

import sys
from dataclasses import replace
from pathlib import Path

from autograder.chapters.transformer_3d.mutants import gathers_in_every_tick, keeps_everything
from autograder.contract.task import load, trace
from course.machines import machine
from course.program import costs, memory, parse, timeline
from course.render import timeline_svg
from solutions.transformer_3d import forward_3d

TASK = load("transformer_3d").task("forward_3d")
WHERE = machine(TASK.machine)
WAYS = {
    "gathered in every tick": gathers_in_every_tick,
    "gathered once, and everything kept": keeps_everything,
    "gathered once for a repeat": forward_3d,
}


def located(file: str) -> str | None:
    return "transformer_3d" if file.endswith(("solutions/transformer_3d.py", "transformer_3d/mutants.py")) else None


def more_microbatches(count: int) -> None:
    """The same mesh and layers, with more ticks, on two machines."""
    assert TASK.analysed
    case = replace(TASK.analysed[0], sizes={**TASK.analysed[0].sizes, "num_microbatches": count})
    names = ("8xH100", "8xA5000")
    print(
        f"\nwith {count} microbatches{'':18}" + "".join(f"{name + ', ms':>14}{'over data, ms':>15}" for name in names)
    )
    for name in ("gathered in every tick", "gathered once for a repeat"):
        module, cells = parse(trace(TASK, WAYS[name], case, located)), ""
        for where in map(machine, names):
            step = timeline(module, where).seconds
            spent = step - timeline(module, where, free=("data",)).seconds
            cells += f"{1e3 * step:14.2f}{1e3 * spent:15.2f}"
        print(f"{name:36}{cells}")


def main(folder: Path) -> None:
    assert TASK.analysed
    case = TASK.analysed[0]
    s = case.sizes
    print(f"{case.mesh_text}, {s['num_layers']} layers of width {s['width']:,}, {s['num_repeats']} repeats,")
    print(f"{s['num_microbatches']} microbatches of {s['seq']} tokens\n")
    print(f"{'':36}{'step, ms':>10}{'over data, ms':>15}{'sent over data, MiB':>21}{'temporaries, MiB':>18}")
    for name, function in WAYS.items():
        program = trace(TASK, function, case, located)
        module = parse(program)
        step = timeline(module, WHERE)
        spent = step.seconds - timeline(module, WHERE, free=("data",)).seconds
        sent = sum(c.total_bytes for c in costs(module).collectives if c.axes == ("data",))
        held = memory(module, program).temporaries
        print(f"{name:36}{1e3 * step.seconds:10.2f}{1e3 * spent:15.2f}{sent / 2**20:21.0f}{held / 2**20:18.0f}")
        short = {"gathered in every tick": "ticks", "gathered once for a repeat": "repeats"}.get(name)
        if short:
            folder.joinpath(f"transformer_3d_gathers_{short}.svg").write_text(timeline_svg(step))
    print("\nexposed in the last one, by axis, in ms")
    for axes, seconds in sorted(step.exposed.items(), key=lambda item: -item[1]):
        if seconds > 1e-5:
            print(f"  {axes:14}{1e3 * seconds:6.2f}")
    more_microbatches(8)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

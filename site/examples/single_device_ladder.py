"""The six published steps: what each technique changes, as ratios, and what each step holds at its peak.

Published figures and what the GPU compiler gives are those that ``course/validation`` keeps; what a step holds is
read from its Program here. The picture goes into the folder that is named.
"""

import sys
from pathlib import Path
from xml.sax.saxutils import escape

import jax

from course.measured.single_device import rates
from course.program import costs, memory, parse
from course.validation.page import here
from course.validation.report import recorded
from course.validation.single_device import RUNS, Sizes, parameters, single_device

PAIRS = (
    ("float32 to bfloat16", 0, 1),
    ("loop to unrolled layers, nothing recomputed", 1, 2),
    ("recompute MLP and attention, each by itself", 1, 3),
    ("recompute whole blocks", 1, 4),
    ("one batch instead of 4 microbatches", 3, 5),
)
NAMES = {run.name: run for run in RUNS}
CAPACITY = 24e9
LEFT, SCALE, ROW, BAR, TOP = 262.0, 20.5, 34.0, 20.0, 34.0


def recorded_rows():
    """The kept rows by quantity and lens, each in the order of ``RUNS``."""
    rows = recorded().rows
    return {
        (group, lens): [row for row in rows if (row.group, row.lens) == (f"A5000, {group}", lens)]
        for group, lens in (("memory", "compiled"), ("time", "replay"))
    }


def steps(held, timed):
    print("| step | measured by others, GB | of the first | compiler | of its first | on a GPU of ours |")
    print("|---|---:|---:|---:|---:|---:|")
    table(held, "{:.1f}", "{:.2f}")
    print("--8<-- [end:memory]\n--8<-- [start:time]")
    print("| step | measured by others, s | of the first | replay | of its first | on a GPU of ours |")
    print("|---|---:|---:|---:|---:|---:|")
    table(timed, "{:.2f}", "{:.3f}")


def table(rows, published, found):
    first = rows[0]
    for row in rows:
        shares = [f"{x / y:.2f}" for x, y in ((row.published, first.published), (row.found, first.found))]
        cells = [row.name, published.format(row.published), shares[0], found.format(row.found), shares[1], here(row)]
        print("| " + " | ".join(cells) + " |")


def techniques(held, timed):
    print("| change | memory, measured | predicted | time, measured | predicted |")
    print("|---|---:|---:|---:|---:|")
    for name, before, after in PAIRS:
        ratios = [
            getattr(rows[after], which) / getattr(rows[before], which)
            for rows in (held, timed)
            for which in ("published", "found")
        ]
        print(f"| {name} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")


def work(modules):
    """Where the replayed time goes, what the Program multiplies, and what that makes of the measured time."""
    print("| step | its products, TFLOP | replay: products, s | others, s | GB moved by others | MFU, published time |")
    print("|---|---:|---:|---:|---:|---:|")
    for run, module, gap in zip(RUNS, modules, recorded().gaps, strict=True):
        side = gap.compiled
        assert side is not None
        mfu = rates(run, Sizes(), run.seconds, "NVIDIA RTX A5000")["mfu"]
        figures = f"{costs(module).flops / 1e12:.1f} | {side.products:.2f} | {side.others:.2f} | {side.moved / 1e9:.0f}"
        print(f"| {run.name} | {figures} | {100 * mfu:.0f} % |")


def shapes_of_gradients():
    leaves = jax.tree.leaves(parameters(Sizes()))
    return {leaf.shape for leaf in leaves} | {leaf.shape[1:] for leaf in leaves if len(leaf.shape) > 1}


def parts(held):
    """Bytes of the state, of gradients and their total, and of everything else that is alive at the peak."""
    shapes = shapes_of_gradients()
    gradients = sum(alive.bytes for alive in held.alive if alive.dtype == "f32" and alive.shape in shapes)
    state = held.peak - held.temporaries
    return state, gradients, held.temporaries - gradients


def kept(memories):
    print("| step | state | gradients | activations | together, GB | published |")
    print("|---|---:|---:|---:|---:|---:|")
    for run, held in zip(RUNS, memories, strict=True):
        cells = " | ".join(f"{part / 1e9:.2f}" for part in parts(held))
        print(f"| {run.name} | {cells} | {held.peak / 1e9:.2f} | {run.peak / 1e9:.1f} |")


def picture(memories):
    height = TOP + ROW * len(RUNS) + 34
    width = LEFT + SCALE * CAPACITY / 1e9 + 18
    each = "; ".join(f"{run.name}: {held.peak / 1e9:.1f} GB" for run, held in zip(RUNS, memories, strict=True))
    drawn = [
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img" '
        f'aria-label="Memory at the peak. {each}.">'
    ]
    x = LEFT
    for kind, said, wide in (("param", "state", 74), ("grad", "gradients", 98), ("state", "activations", 104)):
        drawn.append(f'<rect class="{kind}" x="{x:g}" y="6" width="12" height="12"/>')
        drawn.append(f'<text class="small" x="{x + 17:g}" y="16">{said}</text>')
        x += wide
    drawn.append(f'<circle cx="{x + 6:g}" cy="12" r="5" fill="currentColor"/>')
    drawn.append(f'<text class="small" x="{x + 17:g}" y="16">measured by others</text>')
    bottom = TOP + ROW * len(RUNS)
    for tick in (0, 4, 8, 12, 16, 20, 24):
        at = LEFT + SCALE * tick
        drawn.append(f'<path class="edge" d="M{at:g},{TOP - 6:g}V{bottom:g}"/>')
        drawn.append(
            f'<text class="mid small" x="{at:g}" y="{bottom + 16:g}">{tick}{" GB" if tick == 24 else ""}</text>'
        )
    for i, (run, held) in enumerate(zip(RUNS, memories, strict=True)):
        y, at = TOP + ROW * i + (ROW - BAR) / 2, LEFT
        drawn.append(f'<text class="end small" x="{LEFT - 10:g}" y="{y + 14:g}">{escape(run.name)}</text>')
        for kind, size in zip(("param", "grad", "state"), parts(held), strict=True):
            wide = SCALE * size / 1e9
            drawn.append(f'<rect class="{kind}" x="{at:.1f}" y="{y:g}" width="{wide:.1f}" height="{BAR:g}"/>')
            at += wide
        drawn.append(f'<circle cx="{LEFT + SCALE * run.peak / 1e9:.1f}" cy="{y + BAR / 2:g}" r="5" fill="currentColor" '
                     'stroke="var(--md-default-bg-color)" stroke-width="1.5"/>')  # fmt: skip
    return "\n  ".join(drawn) + "\n</svg>\n"


def main(folder):
    found = recorded_rows()
    held, timed = found["memory", "compiled"], found["time", "replay"]
    programs = [single_device(run) for run in RUNS]
    modules = [parse(program) for program in programs]
    memories = [memory(module, program) for module, program in zip(modules, programs, strict=True)]
    print("--8<-- [start:memory]")
    steps(held, timed)
    print("--8<-- [end:time]\n--8<-- [start:techniques]")
    techniques(held, timed)
    print("--8<-- [end:techniques]\n--8<-- [start:work]")
    work(modules)
    print("--8<-- [end:work]\n--8<-- [start:kept]")
    kept(memories)
    print("--8<-- [end:kept]\n--8<-- [start:size]")
    for index in (1, 2):
        size = len(programs[index].serialise())
        print(f"{RUNS[index].name:20}{size / 1e3:6.0f} kB of program")
    print("--8<-- [end:size]")
    (Path(folder) / "single_device_ladder.svg").write_text(picture(memories))


if __name__ == "__main__":
    main(sys.argv[1])

"""Two of the published steps through the lenses: the first, in float32, and the one that recomputes in bfloat16.

The pictures of what they hold at the peak go into the folder that is named.
"""

import linecache
import sys
from dataclasses import replace
from pathlib import Path

from course.predict import predict
from course.render import memory_svg
from course.validation import single_device as study

SHOWN = ("step", "FLOPs of a device", "memory at the peak", "of it temporaries")
STEPS = {"float32": study.RUNS[0], "remat": study.RUNS[3]}
LINES = 5


def short(line):
    """``single_device.py:135`` without its folders."""
    return line.rsplit("/", 1)[-1]


def code(line):
    """How that line of the step begins."""
    text = linecache.getline(study.__file__, int(line.rsplit(":", 1)[1])).strip()
    return text if len(text) <= 46 else text[:42] + " ..."


def report(run, found):
    figures = found.figures()
    print(f"{run.name}, on {found.machine.name}, as written")
    for name in SHOWN:
        print(f"  {name:20}{figures[name]}")
    print("  where the time goes")
    for entry in found.lines()[:LINES]:
        share = f"{100 * entry.compute / found.timeline.seconds:.1f} %"
        print(f"  {share:>8}  line {entry.line.rsplit(':', 1)[1]}: {code(entry.line)}")


def picture(held):
    """Of what lives at the peak, in words short enough for a page."""
    alive = tuple(replace(one, line=short(one.line)) for one in held.alive)
    return memory_svg(replace(held, alive=alive), 24e9).replace(" times ", " × ")


if __name__ == "__main__":
    for name, run in STEPS.items():
        found = predict(study.single_device(run), "8xA5000", name=run.name)
        print(f"--8<-- [start:{name}]")
        report(run, found)
        print(f"--8<-- [end:{name}]")
        (Path(sys.argv[1]) / f"single_device_peak_{name}.svg").write_text(picture(found.memory))

"""The family of pipeline schedules side by side: bubble, memory and communication, as a table and as pictures.

The pictures go into the folder that is named; ``--help`` says how to choose other sizes.
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from course.machines import FREE_NETWORK
from course.program import parse, timeline
from course.render import schedule_svg
from course.render.quantities import digits, share_text
from course.schedules import (
    FAMILY,
    LOOPED,
    Costs,
    Measured,
    breadth_first,
    compare,
    family,
    forwards,
    gpipe,
    pipedream,
    run,
    written,
)
from course.validation.pipelines import pipeline

COLUMNS = ("schedule", "repeats", "bubble", "bubble, slow network", "activations, first stage", "last stage",
           "copies of weights", "messages")  # fmt: skip
BY_HAND = ("F0 F1 F2 B0 B1 B2", "F0 B0 F1 F2 B1 B2", "F0 B0 F1 B1 F2 B2")


def row(name: str, repeats: int, found: Measured, slow: Measured) -> str:
    cells = (name, repeats, share_text(found.bubble, 1), share_text(slow.bubble, 1), digits(found.activations[0]),
             digits(found.activations[-1]), max(found.weights), max(found.messages))  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def table(sizes: Namespace) -> None:
    """The whole family; of communication the stage that sends most, of weights the one that keeps most copies."""
    free, slow = (
        compare(sizes.stages, sizes.microbatches, sizes.repeats, costs) for costs in (Costs(), Costs(send=sizes.send))
    )
    print(f"| {' | '.join(COLUMNS)} |\n|---|{'---:|' * (len(COLUMNS) - 1)}")
    for name in FAMILY:
        if name in free:
            repeats = sizes.repeats if name in LOOPED else 1
            title = family(name, sizes.stages, sizes.microbatches, repeats).name
            print(row(title, repeats, free[name], slow[name]))


def pictures(folder: Path) -> None:
    def save(name: str, picture: str) -> None:
        folder.joinpath(f"pipeline_schedules_{name}.svg").write_text(picture)

    for name in FAMILY:
        drawn = family(name, 4, 8, 2 if name in LOOPED else 1) if name != "pipedream" else pipedream(4, 8, stream=10)
        save(name, schedule_svg(drawn))
    save("few", schedule_svg(breadth_first(4, 2, 3)))
    save("slow", schedule_svg(run(family("1f1b", 4, 8), Costs(send=0.25))))
    save("by_hand", schedule_svg(written(BY_HAND)))
    for name, masked in (("masked", True), ("skipped", False)):
        step = timeline(parse(pipeline(4, 6, masked=masked)), FREE_NETWORK)
        save(name, schedule_svg(step, forwards(gpipe(4, 6))))


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="for pictures; without it there are none")
    for name, size in (("stages", 4), ("microbatches", 8), ("repeats", 2)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--send", type=float, default=0.25, help="time of a message on the slow network; forward is 1")
    chosen = parser.parse_args()
    table(chosen)
    if chosen.folder:
        pictures(chosen.folder)


if __name__ == "__main__":
    main()

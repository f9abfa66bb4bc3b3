"""The family of pipeline schedules side by side: bubble, memory and communication, as a table and as pictures.

``python site/examples/schedules.py --help`` explains how to print the table for other sizes.
"""

from argparse import ArgumentParser

from showing import Table, draw, example, say

from course.machines import FREE_NETWORK
from course.program import parse, timeline
from course.render import schedule_svg
from course.render.quantities import digits, share_text
from course.schedules import (
    FAMILY,
    LOOPED,
    Costs,
    breadth_first,
    bubble_form,
    compare,
    family,
    forwards,
    gpipe,
    measure,
    num_ticks,
    one_f_one_b,
    pipedream,
    run,
    written,
)
from course.validation.pipelines import pipeline

COLUMNS = (
    "repeats",
    "bubble",
    "bubble on a slow network",
    "activations, first stage",
    "last stage",
    "copies of weights",
    "messages",
)
BY_HAND = ("F0 F1 F2 B0 B1 B2", "F0 B0 F1 F2 B1 B2", "F0 B0 F1 B1 F2 B2")


@example
def table(stages: int = 4, microbatches: int = 8, repeats: int = 2, send: float = 0.25) -> Table:
    """The whole family; communication of the stage that sends the most, and weights of the one with the most copies."""
    free, slow = (compare(stages, microbatches, repeats, costs) for costs in (Costs(), Costs(send=send)))
    shown = Table("schedule", *(f"{column} s" for column in COLUMNS), markdown=True)
    for name, found in free.items():
        times = repeats if name in LOOPED else 1
        shares = share_text(found.bubble, 1), share_text(slow[name].bubble, 1)
        counts = digits(found.activations[0]), digits(found.activations[-1]), max(found.weights), max(found.messages)
        shown.add(family(name, stages, microbatches, times).name, *map(str, (times, *shares, *counts)))
    return shown


@example
def pictures() -> None:
    for name in FAMILY:
        drawn = family(name, 4, 8, 2 if name in LOOPED else 1) if name != "pipedream" else pipedream(4, 8, stream=10)
        draw(name, schedule_svg(drawn))
    few, by_hand = breadth_first(4, 2, 3), written(BY_HAND)
    draw("few", schedule_svg(few))
    draw("slow", schedule_svg(run(family("1f1b", 4, 8), Costs(send=0.25))))
    draw("by_hand", schedule_svg(by_hand))
    for name, masked in (("masked", True), ("skipped", False)):
        step = timeline(parse(pipeline(4, 6, masked=masked)), FREE_NETWORK)
        draw(name, schedule_svg(step, forwards(gpipe(4, 6))))
    say(
        few=share_text(measure(run(few)).bubble, 1),
        by_hand=digits(run(by_hand).end),
        real=digits(run(one_f_one_b(3, 3)).end),
    )
    assert num_ticks(4, 6) == 9, "both take nine ticks"


@example
def claims() -> None:
    """Check the page's claims about its table."""
    free, slow = (compare(4, 8, 2, costs) for costs in (Costs(), Costs(send=0.25)))
    assert free["1f1b"].bubble == free["gpipe"].bubble
    assert max(free["1f1b"].activations) < max(free["gpipe"].activations)
    lost = {name: slow[name].bubble - free[name].bubble for name in FAMILY}
    assert lost["1f1b"] > 2 * lost["gpipe"]
    assert free["interleaved"].activations[0] == 4 + 3 / 2, "S + (S-1)/R"
    assert free["interleaved"].messages[1] == 2 * free["1f1b"].messages[1]
    gpipe = bubble_form("gpipe", 4, 16) or 0
    assert all(abs((bubble_form(name, 4, 8, 2) or 0) - gpipe) < 1e-9 for name in ("interleaved", "breadth_first"))
    assert measure(run(pipedream(4, 8))).weights == (4, 3, 2, 1)
    assert 0.45 < compare(8, 8, 1)["gpipe"].bubble < 0.5, "almost half"


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    for name, size in (("stages", 4), ("microbatches", 8), ("repeats", 2)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--send", type=float, default=0.25, help="time of a message on the slow network; forward is 1")
    print(table(**vars(parser.parse_args())))

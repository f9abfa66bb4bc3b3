"""Pipeline schedules side by side, as tables and as programs, and what old weights cost.

``python site/examples/schedules.py --help`` explains how to print the table for other sizes.
"""

from argparse import ArgumentParser
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from showing import Table, draw, draw_timelines, example, look, program, say

from autograder.chapters.mutant import patch
from autograder.chapters.schedules import mutants
from autograder.chapters.schedules.alternatives import with_a_shorter_lead
from autograder.chapters.schedules.orders import lines_of
from autograder.chapters.schedules.wrapping import Executed
from autograder.contract.task import Case, load
from course.machines import FREE_NETWORK, machine
from course.program import bubble, memory, parse, timeline
from course.render import schedule_svg
from course.render.quantities import digits, share_text
from course.schedules import (
    FAMILY,
    LOOPED,
    Costs,
    breadth_first,
    bubble_form,
    compare,
    dualpipe,
    family,
    forwards,
    gpipe,
    measure,
    num_ticks,
    one_f_one_b,
    pipedream,
    run,
    tabulate,
    written,
    zero_bubble,
    zero_bubble_2,
    zero_bubble_v,
)
from course.validation.pipelines import pipeline
from solutions.schedules import execute_schedule

TASK = load("schedules").task("execute_schedule")
A100 = machine("8xA100")

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


@example("counted by closed form")
def table(stages: int = 4, microbatches: int = 8, repeats: int = 2, send: float = 0.25) -> Table:
    """The whole family; communication of the stage that sends the most, and weights of the one with the most copies."""
    free, slow = (compare(stages, microbatches, repeats, costs) for costs in (Costs(), Costs(send=send)))
    shown = Table("schedule", *(f"{column} s" for column in COLUMNS))
    for name, measures in free.items():
        times = repeats if name in LOOPED else 1
        shares = share_text(measures.bubble, 1), share_text(slow[name].bubble, 1)
        counts = (
            digits(measures.activations[0]),
            digits(measures.activations[-1]),
            max(measures.weights),
            max(measures.messages),
        )
        shown.add(family(name, stages, microbatches, times).name, *map(str, (times, *shares, *counts)))
    return shown


@example("counted by closed form")
def pictures() -> None:
    for name in FAMILY:
        drawn = family(name, 4, 8, 2 if name in LOOPED else 1) if name != "pipedream" else pipedream(4, 8, stream=12)
        draw(name, schedule_svg(drawn))
    few, by_hand = breadth_first(4, 2, 3), written(BY_HAND)
    draw("few", schedule_svg(few))
    draw("slow", schedule_svg(run(family("1f1b", 4, 8), Costs(send=0.25))))
    draw("by_hand", schedule_svg(by_hand))
    for name, masked in (("masked", True), ("skipped", False)):
        step = timeline(parse(pipeline(4, 6, masked=masked)), FREE_NETWORK)
        draw(name, schedule_svg(step, forwards(gpipe(4, 6))), "predicted, idealised")
    say(
        few=share_text(measure(run(few)).bubble, 1),
        by_hand=digits(run(by_hand).end),
        real=digits(run(one_f_one_b(3, 3)).end),
    )
    assert num_ticks(4, 6) == 9, "both take nine ticks"


@example()
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


@example("counted by closed form")
def filled() -> Table:
    """ZB-H2, ZB-V and DualPipe next to ZB-H1, with the links that show them in the explorer."""
    shown = Table("schedule", "time of a step s", "idle inside s", "activations s", "copies of weights s")
    links = []
    schedules = {
        "1f1b": one_f_one_b(4, 8),
        "zero_bubble": zero_bubble(4, 8),
        "zb_h2": zero_bubble_2(4, 8),
        "zb_v": zero_bubble_v(4, 8),
        "dualpipe": dualpipe(4, 8),
    }
    for key, schedule in schedules.items():
        timed = run(schedule)
        measures = measure(timed)
        own = [spans[-1].end - spans[0].start - sum(s.end - s.start for s in spans) for spans in timed.spans]
        cells = digits(measures.time), digits(max(own)), digits(max(measures.activations)), str(max(measures.weights))
        shown.add(schedule.name, *cells)
        links.append(f'- <a href="#schedule={key}&amp;S=4&amp;M=8&amp;R=1">{schedule.name}</a>')
        if schedule.name not in ("1F1B", "ZB-H1"):
            draw(schedule.name.lower().replace("-", "_"), schedule_svg(schedule))
    say(explorer="\n".join(links))
    rows = {name: {key: float(cell) for key, cell in row.items()} for name, row in shown.rows.items()}
    assert rows["ZB-H2"]["idle inside"] == 0 and rows["ZB-H2"]["activations"] == 7
    assert rows["ZB-V"]["time of a step"] < rows["ZB-H1"]["time of a step"] == 27
    assert rows["ZB-V"]["activations"] == rows["1F1B"]["activations"] == 4
    assert rows["DualPipe"]["time of a step"] == 25 and rows["DualPipe"]["activations"] == 5
    return shown


# The same model of 8 layers on 4 stages in all of them, with 8 microbatches.
TABLES = {
    "GPipe": ("gpipe", 1),
    "1F1B": ("1f1b", 1),
    "interleaved 1F1B": ("interleaved", 2),
    "breadth-first": ("breadth_first", 2),
    "ZB-H1": ("zero_bubble", 1),
}


def case_of(name: str, stages: int = 4, microbatches: int = 8, **sizes: int) -> Case[Executed]:
    family_name, repeats = TABLES[name]
    options: dict[str, Any] = {"rows": 256, "width": 512, "num_layers": 2 // repeats, **sizes}
    executed = Executed(schedule=family_name, num_microbatches=microbatches, num_repeats=repeats, **options)
    return Case(name, {"pipe": stages}, executed)


def split(schedule):
    """The same order with every whole backward pass as its two halves."""
    lines = [" ".join(f"I{w[1:]} W{w[1:]}" if w[0] == "B" else w for w in line.split()) for line in lines_of(schedule)]
    return written(lines, name=schedule.name)


@example("predicted, idealised", "counted by closed form")
def executed() -> Table:
    """One program with five tables, according to the timeline and liveness."""
    columns = "ticks d", "bubble .4f", "closed form .4f", "slots d", "temporaries, MiB .1f", "sent, MiB .1f"
    shown, unit = Table("table", *columns), 2 * 256 * 512**2 / FREE_NETWORK.peak("f32")
    for name, (family_name, repeats) in TABLES.items():
        exported = program(TASK, execute_schedule, case_of(name))
        module = parse(exported)
        step = timeline(module, FREE_NETWORK)
        table = tabulate(family(family_name, 4, 8, repeats))
        bubble_share = bubble(3 * 8 * 2 * 4 * unit, 4, step.seconds)
        form = bubble_form(family_name, 4, 8, repeats) or 0
        live = memory(module, exported).temporaries / 2**20
        sent = look(TASK, execute_schedule, case_of(name), A100).costs.collectives
        bytes_sent = sum(collective.total_bytes for collective in sent) / 2**20
        shown.add(name, table.num_ticks, bubble_share, form, table.num_slots["saved"], live, bytes_sent)
        assert abs(bubble_share - form) < 1e-6
    for name, order in (("gpipe", split(gpipe(4, 8))), ("zero_bubble", zero_bubble(4, 8))):
        title = {"gpipe": "GPipe", "zero_bubble": "ZB-H1"}[name]
        step = timeline(parse(program(TASK, execute_schedule, case_of(title))), FREE_NETWORK)
        draw(f"executed_{name}", schedule_svg(step, order), "predicted, idealised")
    temporaries = {name: row["temporaries"] for name, row in shown.rows.items()}
    assert (
        temporaries["1F1B"] < temporaries["ZB-H1"] < temporaries["GPipe"]
        and temporaries["interleaved 1F1B"] < temporaries["breadth-first"]
    )
    return shown


@example("counted by closed form")
def lead() -> Table:
    """Interleaved 1F1B with Megatron's number of forward passes first, and with fewer."""
    columns = ("messages free .4g", "a message takes 0.1 .4g", "0.5 .4g", "in flight, parts d")
    shown = Table("forward passes first", *columns)
    orders = {"2 (S - s - 1) + (R - 1) S": lines_of(family("interleaved", 4, 8, 2))}
    orders["S - s - 1 + (R - 1) S"] = with_a_shorter_lead(4, 8, 2)
    for name, lines in orders.items():
        schedule = written(lines)
        times = [run(schedule, Costs(send=send)).end for send in (0, 0.1, 0.5)]
        shown.add(name, *times, round(2 * measure(run(schedule)).activations[0]))
    first, last = shown.rows.values()
    assert first["messages free"] == last["messages free"] and first["0.5"] < last["0.5"]
    assert last["in flight"] < first["in flight"]
    return shown


def edited(name: str, *changes: dict[str, str]):
    """The solution with mistakes in it."""
    return patch(execute_schedule, name, {old: new for edits in changes for old, new in edits.items()}, "").function


ALL_PASSES, EVERY_PLACE = {mutants.SWITCH: mutants.CHOICE}, {mutants.PLACES: mutants.EVERY}
WAYS = {
    "first version": edited("first_version", ALL_PASSES, EVERY_PLACE),
    "one pass, a slot for every microbatch": edited("keeps_every_place", EVERY_PLACE),
    "all passes, slots": edited("chooses", ALL_PASSES),
    "one pass, slots": execute_schedule,
}


@example("predicted, idealised")
def executor() -> dict[str, Table]:
    """An executor that computes too much and keeps too much, corrected step by step, on 4 of 8 A100s."""
    shown = Table("executor", "step, ms .2f", "computing, ms .2f", "FLOPs, G .1f", "temporaries, MiB .0f")
    steps = {}
    for name, function in WAYS.items():
        prediction = look(TASK, function, case_of("1F1B", microbatches=16, **LARGE), A100, located)
        step, live = prediction.timeline, prediction.memory.temporaries
        shown.add(name, 1e3 * step.seconds, 1e3 * step.busy, prediction.costs.flops / 1e9, live / 2**20)
        steps[name] = step
    draw_timelines("executor", first=steps["first version"], last=steps["one pass, slots"])
    first, last = shown["first version"], shown["one pass, slots"]
    assert first.step > 2 * last.step and first.temporaries > 2 * last.temporaries
    tables = Table("table", "step, ms .2f", "exposed over pipe, ms .2f", "temporaries, MiB .0f")
    for name in TABLES:
        prediction = look(TASK, execute_schedule, case_of(name, microbatches=16, **LARGE), A100)
        exposed = prediction.timeline.exposed.get("pipe", 0.0)
        tables.add(name, 1e3 * prediction.timeline.seconds, 1e3 * exposed, prediction.memory.temporaries / 2**20)
    rows = tables.rows
    assert min(rows, key=lambda name: rows[name].step) == "ZB-H1"
    assert min(rows, key=lambda name: rows[name].temporaries) == "1F1B"
    looped = rows["interleaved 1F1B"], rows["breadth-first"]
    assert np.isclose(*(row["exposed over pipe"] for row in looped)) and looped[1].step < looped[0].step
    alike = {}
    for name in ("interleaved 1F1B", "breadth-first"):
        actions = tabulate(family(TABLES[name][0], 4, 16, 2)).columns["action"]
        alike[name] = float(np.mean([len({*row} - {0}) == 1 for row in actions]))
    say(alike={name: f"{share:.0%}" for name, share in alike.items()})
    say(times=f"{first.step / last.step:.1f}", less=f"{first.temporaries / last.temporaries:.1f}")
    return {"executor": shown, "on_a100": tables}


LARGE = {"rows": 2048, "width": 2048}


def located(file: str) -> str | None:
    return "schedules" if file.endswith(("solutions/schedules.py", ">")) else None


# A residual MLP on four stages, one layer each, that learns the outputs of a fixed random network.
STAGES, RATES, STEPS = 4, (0.01, 0.02, 0.03, 0.05, 0.08), 400


def loss_of(weights, batch):
    x = batch["inputs"]
    for up, down in zip(weights["up"], weights["down"], strict=True):
        x = x + jnp.tanh(x @ up) @ down
    return jnp.mean(jnp.sum((x - batch["targets"]) ** 2, -1)) / 2


def delayed(weights, batches, rate, delays):
    """SGD in which stage ``s`` uses weights that are ``delays[s]`` updates old, for whole passes; all losses."""
    most = max(delays)
    places = jnp.asarray(delays)

    def step(history, batch):
        used = jax.tree.map(lambda leaf: jnp.stack([leaf[places[s], s] for s in range(STAGES)]), history)
        loss, gradient = jax.value_and_grad(loss_of)(used, batch)
        newest = jax.tree.map(lambda leaf, g: leaf[0] - rate * g, history, gradient)
        return jax.tree.map(lambda leaf, new: jnp.concatenate([new[None], leaf[:-1]]), history, newest), loss

    history = jax.tree.map(lambda leaf: jnp.stack([leaf] * (most + 1)), weights)
    history, losses = jax.lax.scan(step, history, batches)
    return jax.tree.map(lambda leaf: leaf[0], history), losses


def stashed(weights, batches, rate):
    """PipeDream as its stages run it: each keeps the weights of a forward pass until the backward pass."""
    count = len(batches["inputs"])
    stage_weights = [jax.tree.map(lambda leaf, s=s: leaf[s], weights) for s in range(STAGES)]
    stash, inputs, gradients = {}, {}, {}
    layer = jax.jit(lambda own, x: x + jnp.tanh(x @ own["up"]) @ own["down"])
    pull = jax.jit(lambda own, x, dy: jax.vjp(layer, own, x)[1](dy))
    events = [span for own in run(pipedream(STAGES, count, stream=count)).spans for span in own]
    for span in sorted(events, key=lambda span: (span.start, span.action.kind)):
        stage, number = span.stage, span.action.microbatch
        if span.action.kind == "F":
            x = inputs[stage, number] if stage else batches["inputs"][number]
            stash[stage, number] = stage_weights[stage], x
            y = layer(stage_weights[stage], x)
            inputs[stage + 1, number] = y
            if stage == STAGES - 1:
                gradients[stage, number] = (y - batches["targets"][number]) / len(y)
        else:
            of_own, dx = pull(*stash.pop((stage, number)), gradients[stage, number])
            stage_weights[stage] = jax.tree.map(lambda w, g: w - rate * g, stage_weights[stage], of_own)
            gradients[stage - 1, number] = dx
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *stage_weights)


@example("run on CPU devices")
def asynchrony() -> Table:
    """The same training with gradients in time, one update late, and late by stage."""
    random = np.random.default_rng(0)
    shapes = {"up": (STAGES, 8, 16), "down": (STAGES, 16, 8)}
    weights, teacher = (
        {name: jnp.float32(scale * random.standard_normal(shape)) for name, shape in shapes.items()}
        for scale in (0.1, 0.4)
    )
    inputs = jnp.float32(random.standard_normal((STEPS, 32, 8)))

    def answer(x):
        for up, down in zip(teacher["up"], teacher["down"], strict=True):
            x = x + jnp.tanh(x @ up) @ down
        return x

    batches = {"inputs": inputs, "targets": answer(inputs)}
    ways = {"in time": (0,) * STAGES, "one update late": (1,) * STAGES, "late by stage": tuple(range(STAGES))[::-1]}
    shown = Table("learning rate", *(f"{name} .3g" for name in ways))
    train = jax.jit(delayed, static_argnums=3)
    for rate in RATES:
        losses = [train(weights, batches, rate, delays)[1] for delays in ways.values()]
        ends = [float(jnp.mean(loss[-20:])) for loss in losses]
        shown.add(rate, *(end if end < 100 else "diverges" for end in ends))
    best = min(shown.rows, key=lambda rate: shown[rate]["in time"])
    own, late, stage = shown[best].values()
    say(best_in_time=best, late_costs=f"{late / own - 1:.0%}", stage_costs=f"{stage / own - 1:.0%}")
    assert 0 < late / own - 1 < stage / own - 1 and "diverges" in shown[str(RATES[-1])].values()
    for late in (1, 2, 3):  # w[t + 1] = w[t] - rate * w[t - late] on a parabola
        limit = 2 * np.sin(np.pi / (4 * late + 2))
        for rate in (limit - 0.01, limit + 0.01):
            roots = np.roots([1, -1, *[0] * (late - 1), rate])
            assert (np.max(np.abs(roots)) < 1) == (rate < limit)
    first = jax.tree.map(lambda leaf: leaf[:24], batches)
    stashed_weights, delayed_weights = (
        stashed(weights, first, 0.02),
        delayed(weights, first, 0.02, ways["late by stage"])[0],
    )
    for stashed_leaf, delayed_leaf in zip(
        jax.tree.leaves(stashed_weights), jax.tree.leaves(delayed_weights), strict=True
    ):
        np.testing.assert_allclose(stashed_leaf, delayed_leaf, atol=1e-6)
    return shown


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    for name, size in (("stages", 4), ("microbatches", 8), ("repeats", 2)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--send", type=float, default=0.25, help="time of a message on the slow network; forward is 1")
    print(table(**vars(parser.parse_args())))

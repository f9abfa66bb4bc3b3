"""Looped pipelines: the bubble of a forward pass, more repeats on a network, and averages overlapping other repeats."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from showing import Table, draw, draw_timelines, example, look, over, program, realistic, say

from autograder.chapters.looping_pipeline import mutants
from autograder.chapters.looping_pipeline.alternatives import by_hand, with_a_mean_on_the_way_back
from autograder.contract.task import load
from course.machines import FREE_NETWORK, machine
from course.program import bubble, memory, parse, timeline
from course.render import schedule_svg
from course.schedules import breadth_first, forwards, gpipe, num_ticks
from course.validation.pipelines import uva_pipeline
from solutions.looping_pipeline import execute_looping_pipeline, looping_train_step

TASK = load("looping_pipeline").task("looping_train_step")
A5000 = machine(TASK.machine)
END, REPEAT, SCANNED = "after the backward pass", "each repeat, while others run", "the same, layers in a scan"
WAYS = {
    END: mutants.averages_after_the_backward_pass,
    "in every tick": mutants.averages_in_every_tick,
    "each repeat twice": mutants.averages_every_repeat_twice,
    REPEAT: looping_train_step,
    SCANNED: with_a_mean_on_the_way_back,
}


def forward(stages, microbatches, repeats, layers=8, rows=64, width=64):
    """The forward pass of layers of two products each, on the stages of ``pipe``."""
    stack = (repeats, stages, layers // (repeats * stages))
    shapes = {"up": (*stack, width, 4 * width), "down": (*stack, 4 * width, width), "x": (microbatches, rows, width)}
    inputs = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    specs = {"up": P(None, "pipe"), "down": P(None, "pipe"), "x": P()}

    def local(up, down, x):
        def stage(x, microbatch, repeat):
            for layer in range(stack[2]):
                x = x + jax.nn.gelu(x @ up[repeat, 0, layer]) @ down[repeat, 0, layer]
            return x

        x = lax.pcast(x, "pipe", to="varying")
        return {"y": execute_looping_pipeline(stage, x, repeats, "pipe")[None]}

    return parse(over({"pipe": stages}, local, inputs, specs, {"y": P("pipe")}))


def form(stages, microbatches, repeats):
    return 1 - repeats * microbatches / num_ticks(stages, microbatches, repeats)


@example("predicted, idealised", "counted by closed form")
def bubbles() -> Table:
    columns = "1 repeat .4f", "its formula .4f", "2 repeats .4f", "their formula .4f"
    table, useful = Table("microbatches", *columns), 8 * 2 * 2 * 64 * 64 * 256 / FREE_NETWORK.peak("f32")
    for count in (1, 2, 4, 6, 16):
        cells = []
        for repeats in (1, 2):
            seconds = timeline(forward(4, count, repeats), FREE_NETWORK).seconds
            cells += [bubble(count * useful, 4, seconds), form(4, count, repeats)]
            assert abs(cells[-2] - cells[-1]) < 5e-5
        table.add(count, *cells)
    for name, sizes in {"plain": (4, 4, 1), "looped": (4, 4, 2), "few": (4, 2, 2), "many": (2, 5, 2)}.items():
        built = breadth_first(*sizes) if sizes[2] > 1 else gpipe(*sizes[:2])
        draw(
            f"bubble_{name}",
            schedule_svg(timeline(forward(*sizes), FREE_NETWORK), forwards(built)),
            "predicted, idealised",
        )
    for stages, count in ((4, 8), (4, 2)):
        for repeats in (1, 2, 4, 8):
            say(**{f"bubble_{count}_{repeats}": f"{round(100 * form(stages, count, repeats), 1):g}"})
    assert abs(form(2, 8, 1) - 1 / 9) < 1e-9 and abs(form(2, 8, 8) - 1 / 65) < 1e-9
    say(faster=f"{num_ticks(2, 8, 8) / 8 / num_ticks(2, 8, 1):.3f}")
    return table


@example("predicted, calibrated")
def network() -> Table:
    columns = (
        "1 repeat .3f",
        "exposed with 1 .3f",
        "2 repeats .3f",
        "exposed with 2 .3f",
        "4 repeats .3f",
        "exposed with 4 .3f",
    )
    table = Table("rows", *columns)
    for rows in (512, 128, 16):
        timelines = [timeline(forward(4, 4, repeats, 16, rows, 2048), A5000) for repeats in (1, 2, 4)]
        table.add(rows, *(1e3 * x for t in timelines for x in (t.seconds, t.exposed.get("pipe", 0.0))))
    return table


@example("measured", "predicted, calibrated")
def published() -> Table:
    """The step that the UvA tutorials time on 8 A5000s, with the timeline's prediction."""
    predicted_seconds = [timeline(parse(uva_pipeline(looped)), A5000).seconds for looped in (False, True)]
    table = Table("2 stages x 4 pipelines", "measured, ms d", "ratio .3f", "predicted, ratio .3f")
    for name, took, seconds in zip(
        ("plain, 8 layers a stage", "looped, 8 repeats of 1 layer"), (205, 190), predicted_seconds, strict=True
    ):
        row = table.add(name, took, took / 205, seconds / predicted_seconds[0])
        assert abs(row.predicted / row.ratio - 1) < 0.02
    return table


@example("counted by closed form")
def averages() -> Table:
    sizes, table = realistic(TASK).sizes, Table("in a step", "bytes or time s")
    weights = 2 * sizes.width * sizes.hidden
    tick = 3 * 2 * sizes.rows * weights / (A5000.peak("f32") * A5000.efficiency.matmul)
    link, count = A5000.links[-1].bandwidth, sizes.num_microbatches
    table.add("weights of one repeat on a device", f"{4e-6 * weights:.1f} MB")
    table.add(f"their average over `data`, at {link / 1e9:g} GB/s", f"{1e3 * 2 * 3 / 4 * 4 * weights / link:.2f} ms")
    table.add(f"one backward tick of {sizes.rows} rows, with the forward pass again", f"{1e3 * tick:.2f} ms")
    table.add(f"a repeat's {count} backward ticks", f"{1e3 * count * tick:.2f} ms")
    return table


def located(file):
    return "looping_pipeline" if file.endswith(("looping_pipeline.py", "looping_pipeline/mutants.py", ">")) else None


@example("predicted, calibrated")
def sync() -> dict[str, Table]:
    table = Table(
        "averaged over data", "step, ms .1f", "exposed over data, ms .1f", "share .2f", "temporaries, GiB .2f"
    )
    programs = {name: program(TASK, function, locate=located) for name, function in WAYS.items()}
    modules, first = {name: parse(exported) for name, exported in programs.items()}, None
    for name, module in modules.items():
        step, free = timeline(module, A5000).seconds, timeline(module, A5000, free=("data",)).seconds
        first = first or step - free
        table.add(
            name,
            1e3 * step,
            1e3 * (step - free),
            (step - free) / first,
            memory(module, programs[name]).temporaries / 2**30,
        )
    slower = Table("links of data slower", "at the end, ms .1f", "a repeat at a time, ms .1f", "saved, ms .1f")
    (inside, between), late, soon = A5000.links, modules[END], modules[REPEAT]
    for times in (1, 2, 4, 16):
        where = replace(A5000, links=(inside, replace(between, bandwidth=between.bandwidth / times)))
        timelines = {"end": timeline(late, where), "repeat": timeline(soon, where)}
        end_ms, repeat_ms = (1e3 * step.seconds for step in timelines.values())
        slower.add(f"{times} times", end_ms, repeat_ms, end_ms - repeat_ms)
        if times in (1, 4):
            draw_timelines(f"sync_{'a5000' if times == 1 else 'slow'}", **timelines)
    first, last, saved = table[END], table[REPEAT], [row.saved for row in slower.rows.values()]
    column = "exposed over data"
    hidden = round(first[column], 1) - round(last[column], 1)
    copies = hidden - round(saved[0], 1)
    assert last.share < 0.25 and 1.6 < table["in every tick"].step / last.step < 2, "nearly twice as long"
    assert table["each repeat twice"][column] > 2 * last[column] and last.temporaries > first.temporaries
    assert abs(saved[1] / (2 * hidden - copies) - 1) < 0.05 and 2.5 < saved[1] / saved[0] < 3.5
    assert saved[2] < 1.3 * saved[1] and abs(saved[3] / saved[2] - 1) < 0.02, "grows no further"
    say(
        hidden=f"{hidden:.1f}",
        copies=f"{copies:.1f}",
        saved=f"{saved[0]:.1f}",
        by_hand=f"{1e3 * look(TASK, by_hand).timeline.seconds:.1f}",
        scanned=f"{table[SCANNED].step / last.step:.2f}",
    )
    return {"sync": table, "slower": slower}

"""Pipelines: bubbles, the cost of idle stages, the memory of a step, the location of the loss, and a hang."""

import math
from functools import cache

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from showing import Table, draw, example, look, over, program, realistic, say

from autograder.chapters.mutant import patch
from autograder.chapters.pipeline.model import most_bytes
from autograder.chapters.pipeline.mutants import keeps_activations
from autograder.chapters.pipeline.schedule import stage_seconds
from autograder.chapters.pipeline.wrapping import Blocks
from autograder.contract.task import Case, load
from course.machines import machine
from course.model import transformer
from course.program import ProgramError, bubble, costs, parse, timeline
from course.render import holdings_svg, memory_svg, schedule_svg
from course.schedules import forwards, gpipe
from solutions.pipeline import execute_pipeline, pipeline_loss, pipeline_train_step

EXECUTE, LOSS, STEP = map(load("pipeline").task, ("execute_pipeline", "pipeline_loss", "pipeline_train_step"))
MIB, GB, H100 = 2**20, 1e9, machine("8xH100")
WATTS = 700  # NVIDIA H100 Tensor Core GPU datasheet: SXM, maximum thermal design power


@example("counted by closed form", numbers_layers="diagram")
def numbers() -> str:
    """The model that the page on FSDP works through, compared with FSDP: 8 stages, 32 microbatches of one sequence."""
    stages, microbatches, seq, width = 8, 32, 2048, 4096
    model = transformer(width=width, hidden=16384, num_layers=32, num_heads=32, vocab=32768, max_seq=seq)
    params = jax.eval_shape(model.init, jax.random.key(0))
    whole, layers = (sum(math.prod(x.shape) for x in jax.tree.leaves(tree)) for tree in (params, params["layers"]))
    block, rest, share, ticks = 4 * seq * width, whole - layers, (stages - 1) / stages, microbatches + stages - 1
    picture = holdings_svg(
        (8, 6),
        P("pipe"),
        {"data": 2, "pipe": 4},
        labels=("layers", "width"),
        show_spec=True,
        title="A stack of 8 layers",
    )
    draw("numbers_layers", picture)
    sent = (2 * microbatches * block + 2 * share * 4 * rest) / GB
    fsdp = 3 * share * 4 * whole / GB
    assert 0.45 < 2 * share * 4 * rest / GB / sent < 0.5, "nearly half of it for embedding and head"
    say(sent=f"{sent:.1f}", fsdp_sent=f"{fsdp:.1f}")
    return "\n".join(
        [
            f"parameters: {whole:,}, a stage {layers // stages + rest:,} (embedding and head: {rest:,})",
            f"a block of 1 x {seq:,} tokens between two stages: {block / MIB:.0f} MiB",
            f"a stage sends, {microbatches} microbatches forward and backward: {2 * microbatches * block / GB:.2f} GB",
            f"all-reduce of embedding and head over the stages: {2 * share * 4 * rest / GB:.2f} GB",
            f"FSDP over 8 devices, two gathers and a reduce-scatter: {fsdp:.2f} GB",
            f"bubble: {(stages - 1) / ticks:.4f}; blocks kept for the backward pass: {ticks * block / GB:.2f} GB",
        ]
    )


# --8<-- [start:skipping]
def skipping(stage, num_microbatches):
    """The same stage, which does nothing when it is idle."""

    def only_real_work(x, microbatch):
        has_work = (microbatch >= 0) & (microbatch < num_microbatches)
        return lax.cond(has_work, lambda x: stage(x, microbatch), lambda x: x, x)

    return only_real_work


# --8<-- [end:skipping]


def garbage(stage, microbatches, axis_name):
    return execute_pipeline(jax.checkpoint(stage), microbatches, axis_name)


def nothing(stage, microbatches, axis_name):
    return execute_pipeline(jax.checkpoint(skipping(stage, microbatches.shape[0])), microbatches, axis_name)


def idle(stage, microbatches, axis_name):
    """Without recomputation the derivative of a branch stores its residuals, even in idle ticks."""
    return execute_pipeline(skipping(stage, microbatches.shape[0]), microbatches, axis_name)


@cache
def executed(function, stages, count):
    """A pipeline of the realistic size, and its timeline."""
    case = realistic(EXECUTE, {"pipe": stages}, num_microbatches=count)
    return case, timeline(parse(program(EXECUTE, function, case)), machine(EXECUTE.machine))


@example("predicted, idealised", "counted by closed form")
def bubbles() -> Table:
    columns = "ticks .0f", "bubble on the timeline .4f", "(S-1)/(M+S-1) .4f"
    table = Table(("stages", "microbatches"), *columns)
    for stages in (4, 8):
        for count in (1, 4, 8, 16, 32):
            case, time = executed(execute_pipeline, stages, count)
            bubble_share = bubble(stages * count * stage_seconds(case), stages, time.seconds)
            row = table.add(
                (stages, count), time.seconds / stage_seconds(case), bubble_share, (stages - 1) / (count + stages - 1)
            )
            assert round(row.ticks) == stages + count - 1 and abs(bubble_share / row["(S-1)/(M+S-1)"] - 1) < 0.01
            if stages == 4 and count in (1, 4, 16):
                name = {1: "one", 4: "few", 16: "many"}[count]
                draw(
                    f"bubble_{name}",
                    schedule_svg(executed(idle, 4, count)[1], forwards(gpipe(4, count))),
                    "predicted, idealised",
                )
    assert (8 - 1) / (63 + 8 - 1) == 0.1, "with 63 microbatches the bubble is a tenth"
    return table


@example("predicted, idealised")
def idles() -> Table:
    ways = {"garbage": garbage, "nothing": nothing, "nothing, all kept": idle}
    columns = "GFLOPs a stage .1f", "step, ms .3f", "computing, ms .3f", "energy, J .2f"
    table = Table(("microbatches", "idle stages compute"), *columns)
    for count in (2, 8, 32):
        rows = []
        for name, function in ways.items():
            case = Case("", {"pipe": 8}, Blocks(rows=2048, width=4096, num_microbatches=count))
            prediction = look(EXECUTE, function, case, H100)
            busy = sum(device.busy * len(device.members) for device in prediction.timeline.devices)
            figures = prediction.costs.flops / 1e9, 1e3 * prediction.timeline.seconds, 1e3 * busy / 8, busy * WATTS
            rows.append(table.add((count, name), *figures))
        waste, none, _ = rows
        assert abs(none["GFLOPs a stage"] / waste["GFLOPs a stage"] * (count + 7) / count - 1) < 1e-3
        say(slower=f"{100 * (none.step / waste.step - 1):.0f}")
        saved = 1 - none.energy / waste.energy
        assert {2: 0.45 < saved < 0.55, 32: 0.055 < saved < 0.075}.get(count, True)
    for name in ("garbage", "nothing"):
        case = Case("", {"pipe": 4}, Blocks(rows=2048, width=4096, backward=False, num_microbatches=4))
        time = timeline(parse(program(EXECUTE, ways[name], case)), machine(EXECUTE.machine))
        draw(f"idle_{name}", schedule_svg(time, forwards(gpipe(4, 4))), "predicted, idealised")
    return table


@example("predicted, idealised", "counted by closed form")
def memory() -> Table:
    columns = "kept, MiB .0f", "step, ms .3f", "computed again, MiB .0f", "its step, ms .3f", "closed form, MiB .0f"
    table = Table("microbatches", *columns)
    for count in (4, 8, 16, 32):
        case, figures = realistic(STEP, num_microbatches=count), []
        for name, function in (("kept", keeps_activations), ("again", pipeline_train_step)):
            prediction = look(STEP, function, case, H100)
            figures += [prediction.memory.temporaries / MIB, 1e3 * prediction.timeline.seconds]
            if count == 32:
                draw(f"memory_{name}", memory_svg(prediction.memory), "predicted")
        row = table.add(count, *figures, most_bytes(case) / MIB)
        assert row["computed again"] <= row["closed form"] and row["its step"] < row.step
    few, many = table["4"], table["32"]
    say(
        growth=f"{(many.kept - few.kept) / 28:.0f}",
        again=f"{(many['computed again'] - few['computed again']) / 28:.0f}",
    )
    return table


EVERY_STAGE = {"if rows % num_stages:": "if True:"}
BY_COND = {
    'loss = model.loss(params["head"], y, batch["targets"], batch["mask"])': (
        'of_rows = lambda y: model.loss(params["head"], y, batch["targets"], batch["mask"])\n'
        "        loss = lax.cond(last, of_rows, lambda y: jnp.zeros_like(y[0, 0]), y)"
    ),
    "jnp.where(last, loss, 0.0)": "loss",
}


@example("predicted, idealised", "predicted, calibrated")
def losses() -> Table:
    """The loss of a model with 32,768 outputs."""
    ways = {
        "on every stage, one counts": patch(pipeline_loss, "on_every_stage", EVERY_STAGE).function,
        "on the last stage, by cond": patch(pipeline_loss, "on_the_last_stage", EVERY_STAGE | BY_COND).function,
        "in parts, on all stages": pipeline_loss,
    }
    columns = (
        "computing, ms: first stage .2f",
        "last stage .2f",
        "step, ms .2f",
        "calibrated .2f",
        "energy, J .2f",
        "temporaries, MiB .0f",
    )
    table = Table("the loss is computed", *columns)
    for name, function in ways.items():
        prediction = look(LOSS, function, where=H100)
        busy = {device: group.busy for group in prediction.timeline.devices for device in group.members}
        table.add(
            name,
            1e3 * busy[0],
            1e3 * busy[7],
            1e3 * prediction.timeline.seconds,
            1e3 * prediction.calibrated_seconds,
            WATTS * sum(busy.values()),
            prediction.memory.temporaries / MIB,
        )
    every_stage, branch, parts = table.rows.values()
    longer = [row.calibrated - row.step for row in table.rows.values()]
    assert max(longer) - min(longer) < 0.2
    say(permutes=f"{longer[0]:.1f}")
    longer = [row.calibrated - row.step for row in table.rows.values()]
    assert max(longer) < 1.05 * min(longer), "by about the same time"
    assert branch.step >= every_stage.step > 1.15 * parts.step, "a branch saves no time, parts do"
    assert branch.energy < 0.85 * every_stage.energy and parts.temporaries < 0.5 * every_stage.temporaries
    say(parts=f"{parts.step / every_stage.step:.2f}", less=f"{every_stage.computing - branch.computing:.2f}")
    return table


# --8<-- [start:loss]
def loss(head, y):
    last = lax.axis_index("pipe") == 7
    own = lax.cond(last, lambda y: jnp.mean((y @ head) ** 2), lambda y: 0 * y[0, 0], y)
    return lax.psum(own, "pipe")


# --8<-- [end:loss]


def located(file):
    return "loss" if file == __file__ else None


@example("run on CPU devices")
def hang() -> str:
    """The gradient of a replicated head, used in a branch of the last stage; as it is, or typed as varying."""
    lines = []
    inputs = {"head": jax.ShapeDtypeStruct((4, 3), jnp.float32), "y": jax.ShapeDtypeStruct((16, 4), jnp.float32)}
    for name, spec in (("replicated", P()), ("varying", P("pipe"))):

        def local(head, y, varying=name == "varying"):
            own = lax.pcast(head, "pipe", to="varying") if varying else head
            return {"head": jax.grad(loss)(own, y)[(None,) * varying]}

        exported = over({"pipe": 8}, local, inputs, {"head": P(), "y": P("pipe")}, {"head": spec}, locate=located)
        try:
            kinds = ", ".join(c.kind for c in costs(parse(exported)).collectives)
            lines.append(f"{name}: {kinds or 'no collective in the gradient'}")
        except ProgramError as error:
            lines.append(f"{name}: {error}")
    assert "devices would wait for each other forever" in lines[0] and "no collective" in lines[1]
    return "\n".join(lines)

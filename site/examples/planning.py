"""What ``meshcraft plan`` prints, how near its closed forms are to the lenses, and meshes that papers trained on."""

from dataclasses import replace

import steps
from showing import Table, example, say
from typer.testing import CliRunner

from autograder.cli import app
from course.budget import Sizes, flops_per_token
from course.machines import TWO_A100, machine
from course.planning import Choice, Training, estimate
from course.planning.search import search
from course.program import memory, parse, timeline

SIZES, H100 = Sizes(layers=8, width=2048, heads=16, vocab=32_000, seq=1024), machine("8xH100")
PLAIN = Training("float32", "sgd")
SEPARATE, SCANNED = replace(PLAIN, pairs=False), replace(PLAIN, scanned=True, pairs=False)
# Sequences, the step, its configuration, and how it trains.
STEPS = {
    "fsdp, data=8": (64, steps.sharded, (8, 1, 1, 1, 8, "block", True), SEPARATE),
    "tp_transformer, tensor=8": (8, steps.over_tensor, (1, 1, 8, 1, 1, "none", False), SCANNED),
    "tp_transformer, data=4 tensor=2": (16, steps.over_tensor, (4, 1, 2, 1, 1, "none", False), SCANNED),
    "looping_pipeline, data=4 pipe=2": (
        64,
        steps.looping,
        (4, 2, 1, 4, 4, "block", False),
        replace(PLAIN, share_loss=False),
    ),
    "transformer_3d, 2 x 2 x 2, FSDP": (64, steps.everything, (2, 2, 2, 4, 4, "block", True), PLAIN),
    "transformer_3d, 4 x 1 x 2": (64, steps.everything, (4, 1, 2, 2, 8, "block", False), PLAIN),
    "transformer_3d, 1 x 8 x 1": (64, steps.everything, (1, 8, 1, 16, 1, "block", False), PLAIN),
    "transformer_3d, 1 x 2 x 4, all kept": (32, steps.everything, (1, 2, 4, 4, 4, "none", False), PLAIN),
    "transformer_3d, 4 x 1 x 2, bfloat16": (
        64,
        steps.everything,
        (4, 1, 2, 2, 8, "block", False),
        Training("cast", "sgd"),
    ),
}
# Narayanan et al. 2021, table 1: billions of parameters, heads, width, layers, tensor, pipe, GPUs, batch, and TFLOP/s
# a GPU.
WEAK_SCALING = (
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
)
# Korthikanti et al. 2022, tables 3 and 5: name, heads, width, layers, tensor, pipe, GPUs, batch, microbatches, repeats,
# seconds of a step with all layers recomputed, and with attention's scores alone.
RECOMPUTATION = (
    ("22B", 64, 6144, 48, 8, 1, 8, 4, 1, 1, 1.42, 1.10),
    ("175B", 96, 12288, 96, 8, 8, 64, 64, 64, 3, 18.13, 13.75),
    ("530B", 128, 20480, 105, 8, 35, 280, 280, 280, 3, 49.05, 37.83),
    ("1T", 160, 25600, 128, 8, 64, 512, 512, 512, 1, 94.42, 71.49),
)
# Megatron-LM keeps half precision with a float32 copy, and sends in one piece.
MEGATRON = Training("mixed", "adam", rings=False, remats=("none", "attention", "block"))


@example
def command() -> str:
    arguments = "plan --layers 16 --width 2048 --heads 16 --batch 64 --machine 8xH100".split()
    done = CliRunner(env={"COLUMNS": "110"}).invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return done.output.rstrip("\n")


@example
def lenses() -> Table:
    table = Table("step", "closed form s", "timeline s", "error .1%", "its closed form s", "liveness s", "its error s")
    errors, sizes = {}, {}
    for name, (batch, step, choice, how) in STEPS.items():
        given, options = Choice(*choice), {"dtype": "bfloat16"} if "bfloat16" in name else {}
        program = step(SIZES, given, batch, **options)
        module, planned = parse(program), estimate(SIZES, H100, batch, given, how)
        time, held = timeline(module, H100).seconds, memory(module, program).peak
        errors[name], more = planned.seconds / time - 1, ("", "", "")
        if step is steps.everything:
            sizes[name] = planned.bytes / held - 1
            more = f"{planned.bytes / 1e9:.1f} GB", f"{held / 1e9:.1f} GB", f"{sizes[name]:.1%}"
        table.add(name, f"{1e3 * planned.seconds:.1f} ms", f"{1e3 * time:.1f} ms", errors[name], *more)
    low, worst = "transformer_3d, 4 x 1 x 2, bfloat16", "transformer_3d, 1 x 8 x 1"
    assert -0.25 < errors.pop(low) < -0.20 < sizes.pop(low) < -0.15, "about a fifth too little of both"
    assert -0.15 < errors.pop(worst) < min(errors.values()), "for the pipeline of 8 stages"
    assert all(-0.1 < error < 0.05 for error in errors.values()), "about a tenth"
    assert all(abs(error) < 0.2 for error in sizes.values()), "inside of the margin of a fifth"
    return table


def cluster(count):
    """A100 in nodes of eight, with InfiniBand between them."""
    inside, between = TWO_A100.links
    links = (inside, replace(between, group=count)) if count > 8 else (inside,)
    return replace(TWO_A100, name=f"{count} A100", num_devices=count, links=links)


def weak_scaling(row):
    """Published MFU; the best use of the published mesh, the best without FSDP, and the best of all."""
    _, heads, width, layers, tensor, pipe, devices, batch, tflops = row
    sizes = Sizes(layers, width, heads, 51_200, 2048)
    # The paper's formula for TFLOP/s counts the recomputed forward pass.
    counted = 96 * layers * width**2 * (1 + 2048 / (6 * width) + 51_200 / (16 * layers * width))
    plans = search(sizes, cluster(devices), batch, MEGATRON)
    assert plans.best
    others = [one.found for one in plans.rejected if one.found]
    whole = [found for found in (plans.best, *others) if found.fits and not found.choice.fsdp]
    # Where nothing fits on the published mesh, what is nearest to it comes first among the rejected.
    large = [found for found in others if not found.fits and not found.choice.fsdp]
    mesh = devices // tensor // pipe, pipe, tensor
    same = next(found for found in (*whole, *large) if found.choice[:3] == mesh)
    return tflops / 312 * flops_per_token(sizes) / counted, (same, whole[0], plans.best)


@example
def published() -> Table:
    table, found = (
        Table(("parameters", "GPUs", "batch"), "measured .1%", "same mesh s", "best, no FSDP s", "best of all s"),
        [],
    )
    for row in WEAK_SCALING:
        measured, ways = weak_scaling(row)
        shown = (f"{' x '.join(map(str, way.choice[:3]))} {way.mfu:5.1%}{' ' if way.fits else '*'}" for way in ways)
        table.add((f"{row[0]}B", row[6], row[7]), measured, *shown)
        same, whole, _ = ways
        assert same.mfu > measured and same.choice[0] == whole.choice[0], (
            "faster than measured; data as the paper has it"
        )
        found.append(ways)
    other = [(same, whole) for same, whole, _ in found if same.choice[:3] != whole.choice[:3]]
    assert (
        len(other) == 6
        and sum(whole.choice[2] < same.choice[2] and whole.choice[1] > same.choice[1] for same, whole in other) == 5
    )
    assert max(best.choice[1] for *_, best in found) == 5 and max(same.choice[1] for same, *_ in found) == 64
    assert [same.fits for same, *_ in found] == [True] * 9 + [False]
    return table


@example
def recomputation() -> Table:
    columns = "measured, s .2f", "predicted, s .2f", "ratio .2f", "where the predicted time goes, s s"
    table = Table(("", "recomputed"), *columns)
    for name, heads, width, layers, tensor, pipe, devices, batch, microbatches, repeats, every, scores in RECOMPUTATION:
        for recomputed, remat, measured in (("all", "block", every), ("scores", "attention", scores)):
            choice = Choice(1, pipe, tensor, microbatches, repeats, remat, False)
            found = estimate(Sizes(layers, width, heads, 51_200, 2048), cluster(devices), batch, choice, MEGATRON)
            parts = ", ".join(f"{cause} {seconds:.2f}" for cause, seconds in found.parts.items() if seconds >= 0.005)
            table.add((name, recomputed), measured, found.seconds, found.seconds / measured, parts)
    assert all(1.2 < 1 / row.ratio < 1.5 for row in table.rows.values()), "a fifth to a half longer"
    kinds = [[row for name, row in table.rows.items() if name.endswith(kind)] for kind in (", all", ", scores")]
    for own in kinds:
        ratios = [round(row.ratio, 2) for row in own]
        assert max(ratios) - min(ratios) < 0.055, "nearly the same"
    for which in ("measured", "predicted"):
        times = [one[which] / other[which] for one, other in zip(*kinds, strict=True)]
        say(**{f"least_{which}": f"{min(times):.2f}", f"most_{which}": f"{max(times):.2f}"})
    return table

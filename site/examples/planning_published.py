"""What the planner makes of the meshes that papers trained on: A100 with 80 GB, eight in a node."""

from __future__ import annotations

from dataclasses import replace

from course.budget import Sizes, flops_per_token
from course.machine import Machine
from course.machines import TWO_A100
from course.planning import Choice, Estimate, Training, estimate
from course.planning.search import search

SEQ, VOCAB = 2048, 51_200
# Megatron-LM keeps half precision with a float32 copy, and sends in one piece.
TRAINING = Training("mixed", "adam", rings=False, remats=("none", "attention", "block"))
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


def cluster(num_devices: int) -> Machine:
    """So many A100 in nodes of eight, with InfiniBand between them."""
    inside, between = TWO_A100.links
    links = (inside, replace(between, group=num_devices)) if num_devices > 8 else (inside,)
    return replace(TWO_A100, name=f"{num_devices} A100", num_devices=num_devices, links=links)


def published_mfu(sizes: Sizes, tflops: float) -> float:
    """Model FLOPs as a share of the peak; the paper's formula for TFLOP/s counts the recomputed forward pass."""
    s, h, layers = sizes.seq, sizes.width, sizes.layers
    counted = 96 * layers * h**2 * (1 + s / (6 * h) + sizes.vocab / (16 * layers * h))
    return tflops / 312 * flops_per_token(sizes) / counted


def weak_scaling(row: tuple) -> tuple[float, Estimate, Estimate, Estimate]:
    """Published MFU; the best use of the published mesh, the best without FSDP, and the best of all."""
    _, heads, width, layers, tensor, pipe, devices, batch, tflops = row
    sizes = Sizes(layers, width, heads, VOCAB, SEQ)
    plans = search(sizes, cluster(devices), batch, TRAINING)
    assert plans.best
    fitting = [plans.best, *(one.found for one in plans.rejected if one.found and one.found.fits)]
    whole = [found for found in fitting if not found.choice.fsdp]
    # Where nothing fits on the published mesh, what is nearest to it comes first among the rejected.
    large = [one.found for one in plans.rejected if one.found and not one.found.fits and not one.found.choice.fsdp]
    mesh = devices // tensor // pipe, pipe, tensor
    same = next(found for found in (*whole, *large) if found.choice[:3] == mesh)
    return published_mfu(sizes, tflops), same, whole[0], plans.best


def step(row: tuple, remat: str) -> Estimate:
    """A published step as it was run."""
    _, heads, width, layers, tensor, pipe, devices, batch, microbatches, repeats, *_ = row
    sizes, choice = (
        Sizes(layers, width, heads, VOCAB, SEQ),
        Choice(1, pipe, tensor, microbatches, repeats, remat, False),
    )
    return estimate(sizes, cluster(devices), batch, choice, TRAINING)


def shown(found: Estimate) -> str:
    return f"{' x '.join(map(str, found.choice[:3])):>13} {found.mfu:5.1%}{' ' if found.fits else '*'}"


def main() -> None:
    print(f"{'':>7}{'GPUs':>6}{'batch':>7}{'measured':>10}{'same mesh':>20}{'best, no FSDP':>22}{'best':>22}")
    for row in WEAK_SCALING:
        measured, *found = weak_scaling(row)
        print(f"{row[0]:6}B{row[6]:6}{row[7]:7}{measured:10.1%} {'  '.join(map(shown, found))}".rstrip())
    print("* does not fit with a margin of a fifth")
    head = f"\n{'':10}{'recomputed':12}{'measured, s':>12}{'predicted, s':>13}{'ratio':>7}"
    print(f"{head}   where the predicted time goes, s")
    for row in RECOMPUTATION:
        for name, remat, measured in (("all", "block", row[-2]), ("scores", "attention", row[-1])):
            found = step(row, remat)
            parts = ", ".join(f"{cause} {seconds:.2f}" for cause, seconds in found.parts.items() if seconds >= 0.005)
            print(f"{row[0]:10}{name:12}{measured:12.2f}{found.seconds:13.2f}{found.seconds / measured:7.2f}   {parts}")


if __name__ == "__main__":
    main()

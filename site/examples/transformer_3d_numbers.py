"""What a device holds and sends of a Transformer of about a billion parameters, by closed forms, on six meshes.

Pictures of who holds what go into the folder that is named.
"""

import sys
from pathlib import Path

from autograder.chapters.transformer_3d.sent import gathered, parts_over_data, permuted, ticks_of
from autograder.chapters.transformer_3d.shared import SIZES, part_bytes
from autograder.chapters.transformer_3d.wrapping.model import sizes_of
from autograder.contract.task import Case
from course.render import holdings_svg

BILLION = {**SIZES, "width": 2048, "hidden": 8192, "num_heads": 16, "num_layers": 16, "vocab": 32_000, "seq": 1024,
           "max_seq": 1024, "min_size": 2**16}  # fmt: skip
MESHES = ((2, 2, 2), (1, 2, 4), (4, 1, 2), (8, 1, 1), (1, 8, 1), (1, 1, 8))
SEQUENCES, MICROBATCHES, REPEATS = 32, 4, 2


def case_of(mesh: tuple[int, int, int]) -> Case:
    """The same batch on every mesh; where there is no pipeline, one microbatch and a repeat for each layer."""
    data, pipe, _ = mesh
    count = MICROBATCHES if pipe > 1 else 1
    repeats = REPEATS if pipe > 1 else BILLION["num_layers"]
    sizes = {**BILLION, "num_microbatches": count, "num_repeats": repeats, "rows": SEQUENCES // data // count}
    return Case("", dict(zip(("data", "pipe", "tensor"), mesh, strict=True)), sizes)


def activations_sent(case: Case) -> float:
    """Over the tensor axis: 4 gathers or scatters a layer forward, again in the recomputation, and backward."""
    s, (_, pipe, tensor) = case.sizes, sizes_of(case)
    rows = s["rows"] * s["num_microbatches"] * s["seq"]
    return 12 * s["num_layers"] / pipe * (tensor - 1) / tensor * 4 * rows * s["width"]


def main(folder: Path) -> None:
    print(f"{'':14}{'held,':>8}{'whole on':>10}{'gathered over':>15}{'permuted':>11}{'over tensor,':>14}{'bubble,':>9}")
    print(f"{'mesh':14}{'MiB':>8}{'data, MiB':>10}{'data, MiB':>15}{'MiB':>11}{'MiB':>14}{'percent':>9}")
    for mesh in MESHES:
        case, (_, pipe, _) = case_of(mesh), mesh
        held = sum(size for size, _, _ in part_bytes(case))
        whole = held - parts_over_data(case) if mesh[0] > 1 else held
        useful = case.sizes["num_repeats"] * case.sizes["num_microbatches"]
        bubble = 100 * (1 - useful / ticks_of(case)) if pipe > 1 else 0.0
        print(
            f"{' x '.join(map(str, mesh)):14}{held / 2**20:8.0f}{whole / 2**20:10.1f}{gathered(case) / 2**20:15.0f}"
            f"{permuted(case) / 2**20:11.0f}{activations_sent(case) / 2**20:14.0f}{bubble:9.1f}"
        )
    for which, shape, spec, labels, mesh in (
        ("layers", (2, 4), ("pipe", None), ("stage", "its layers"), {"data": 2, "pipe": 2, "tensor": 2}),
        ("up", (4, 8), (None, ("tensor", "data")), ("width", "hidden"), {"data": 2, "tensor": 2}),
    ):
        drawn = holdings_svg(shape, spec, mesh, labels=labels, show_spec=True)
        folder.joinpath(f"transformer_3d_numbers_{which}.svg").write_text(drawn)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

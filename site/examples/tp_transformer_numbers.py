"""What rings can hide in a layer: FLOPs for each number that is sent, by width and number of devices.

Pictures of who holds what, on two groups of four devices, go into the folder that is named.
"""

import sys
from pathlib import Path

from course.machines import machine
from course.render import holdings_svg

WIDTHS, DEVICES = (2048, 4096, 8192, 16384), (2, 4, 8)
MACHINES = (("8xH100", "f32", 4), ("8xH100", "bf16", 2), ("8xA100", "bf16", 2))


def per_number(width: int, devices: int) -> float:
    """Matmul FLOPs of a layer on a device, over the numbers that it sends for the layer: tokens cancel."""
    return 72 * width**2 / devices / (8 * (devices - 1) / devices * width)


def main(folder: Path) -> None:
    print(f"{'FLOPs for each number sent':28}", *(f"{f'n={n}':>9}" for n in DEVICES))
    for width in WIDTHS:
        print(f"    width {width:<18,}", *(f"{per_number(width, n):9,.0f}" for n in DEVICES))
    print("\nFLOPs that a device can compute while it sends one")
    for name, dtype, size in MACHINES:
        where = machine(name)
        print(f"    {name}, {dtype:17} {where.peak(dtype) * size / where.bandwidth_of(tuple(range(8))):9,.0f}")
    for which, shape, spec, labels in (
        ("activations", (4, 8), ("data", "tensor"), ("sequences", "tokens")),
        ("table", (8, 4), ("tensor", None), ("vocabulary", "width")),
        ("logits", (8, 8), ("data", "tensor"), ("tokens", "vocabulary")),
    ):
        drawn = holdings_svg(shape, spec, {"data": 2, "tensor": 4}, labels=labels, show_spec=True)
        folder.joinpath(f"tp_transformer_numbers_{which}.svg").write_text(drawn)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

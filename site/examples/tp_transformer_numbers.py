"""What rings can hide in a layer: FLOPs for each number that is sent, by width and number of devices."""

from course.machines import machine

WIDTHS, DEVICES = (2048, 4096, 8192, 16384), (2, 4, 8)
MACHINES = (("8xH100", "f32", 4), ("8xH100", "bf16", 2), ("8xA100", "bf16", 2))


def per_number(width: int, devices: int) -> float:
    """Matmul FLOPs of a layer on a device, over the numbers that it sends for the layer: tokens cancel."""
    return 72 * width**2 / devices / (8 * (devices - 1) / devices * width)


def main() -> None:
    print(f"{'FLOPs for each number sent':28}", *(f"{f'n={n}':>9}" for n in DEVICES))
    for width in WIDTHS:
        print(f"    width {width:<18,}", *(f"{per_number(width, n):9,.0f}" for n in DEVICES))
    print("\nFLOPs that a device can compute while it sends one")
    for name, dtype, size in MACHINES:
        where = machine(name)
        print(f"    {name}, {dtype:17} {where.peak(dtype) * size / where.bandwidth_of(tuple(range(8))):9,.0f}")


if __name__ == "__main__":
    main()

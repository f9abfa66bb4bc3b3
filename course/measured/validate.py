"""``make validate-gpu``: measure this machine's GPU and save the figures, with the card, for its kind.

The figures are rates of matmuls and of memory traffic, and time and memory of the single-GPU programs that the analyses
are validated on. Each row is saved as soon as it is measured; another call continues with the missing rows.

Exit status 0: every row is measured; 1: some are not; 2: there is no GPU, or the call is invalid.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import jax

from course.machine import Efficiency
from course.machines import machine
from course.measured import command, fresh
from course.measured.rows import Group
from course.measured.single_device import PEAKS, steps

MiB = 2**20
MATMUL_SIZES = (1024, 2048, 4096, 8192, 16384)
MOVE_SIZES = (16 * MiB, 64 * MiB, 256 * MiB, 1024 * MiB)


def groups(kind: str = "", small: bool = False) -> list[Group]:
    """All groups to measure, cheapest first; ``kind`` and ``small`` as for ``steps``."""
    sizes = (64, 128) if small else MATMUL_SIZES
    move_sizes = (MiB,) if small else MOVE_SIZES
    kernel_groups = [_kernels("matmul", dtype, sizes) for dtype in ("bf16", "f32 default", "f32 highest")]
    kernel_groups += [_kernels(moving, "f32 default", move_sizes) for moving in ("add", "negate")]
    return kernel_groups + steps(kind, small)


def _kernels(kind: str, dtype: str, sizes: tuple[int, ...]) -> Group:
    names = {str(size): kernel_name(kind, dtype, size) for size in sizes}

    def measure(seconds: float, platform: str) -> dict[str, dict[str, Any]]:
        request = {"do": "kernels", "kind": kind, "dtype": dtype, "sizes": sizes}
        answer = fresh.ask(request, seconds=seconds, platform=platform)
        unit = "FLOP/s" if kind == "matmul" else "bytes/s"
        return {name: {**answer[size], "unit": unit} for size, name in names.items()}

    return Group(tuple(names.values()), measure)


def kernel_name(kind: str, dtype: str, size: int) -> str:
    """Name of a row: ``matmul bf16 4096``, ``add 64 MiB``."""
    return f"{kind} {dtype} {size}" if kind == "matmul" else f"{kind} {size // MiB} MiB"


def reached(kind: str, rows: dict[str, dict[str, Any]]) -> Efficiency | None:
    """The factors of a machine: the shares of a kind's published peaks that its largest product and sum reached.

    None for a kind without published peaks, and where one of the two is not measured.
    """
    product = rows.get(kernel_name("matmul", "bf16", MATMUL_SIZES[-1]), {}).get("rate")
    traffic = rows.get(kernel_name("add", "f32 default", MOVE_SIZES[-1]), {}).get("rate")
    if kind not in PEAKS or product is None or traffic is None:
        return None
    ideal = machine(PEAKS[kind])
    return Efficiency(product / ideal.peak("bf16"), traffic / ideal.memory_bandwidth)


def main(arguments: list[str] | None = None) -> int:
    """Measure, and return the exit status."""
    parser = command.parser("python -m course.measured.validate", __doc__ or "")
    parser.add_argument("--only", default="", metavar="REGEX", help="only groups with a row whose name matches")
    parser.add_argument("--platform", choices=["", "cpu"], default="", help="cpu tests the plumbing, at small sizes")
    options = parser.parse_args(arguments)

    def chosen(kind: str) -> list[Group]:
        all_groups = groups(kind, small=options.platform == "cpu")
        return [group for group in all_groups if re.search(options.only, " ".join(group.rows))]

    return command.measure(options, chosen, platform=options.platform, conclusion=_conclusion)


def _conclusion(kind: str, rows: dict[str, dict[str, Any]]) -> str:
    efficiency = reached(kind, rows)
    factors = efficiency and f"{{ matmul = {efficiency.matmul:.3f}, memory = {efficiency.memory:.3f} }}"
    return f"in a machine file: like = {PEAKS[kind]!r} and efficiency = {factors}" if factors else ""


if __name__ == "__main__":
    # Programs are exported here and run elsewhere: this process must not occupy the GPU.
    jax.config.update("jax_platforms", "cpu")
    sys.exit(main())

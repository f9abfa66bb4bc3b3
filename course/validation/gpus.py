"""The GPUs that the six single-GPU runs are compared on: the published A5000, and those that we measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from course.machine import Efficiency, Machine
from course.machines import machine
from course.measured.rows import NOT_MEASURED, recorded_rows
from course.measured.single_device import PEAKS
from course.measured.validate import MATMUL_SIZES, MOVE_SIZES, kernel_name
from course.validation.single_device import RUNS

UVA = "P. Lippe, Training Models at Scale, University of Amsterdam, 2024"
MEASURED = "measured with `make validate-gpu`: course/measurements"
H100 = "NVIDIA H100 80GB HBM3"


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, with what the runs took on it.

    Attributes:
        name: Begins the names of its groups of figures.
        machine: The name of its machine.
        source: Where the runs' figures are from.
        runs: Bytes at the peak and seconds a step of each run, by name.
        own_rates: Its machine with the rates that were measured on the card as its factors, if they were.
    """

    name: str
    machine: str
    source: str
    runs: dict[str, tuple[float, float]]
    own_rates: Machine | None = None

    @property
    def memory(self) -> str:
        return f"{self.name}, memory"

    @property
    def time(self) -> str:
        return f"{self.name}, time"


A5000 = Gpu("A5000", "8xA5000", UVA, {run.name: (run.peak, run.seconds) for run in RUNS})


def ours() -> Iterator[tuple[str, Gpu]]:
    """The kinds of GPU, as JAX names them, that the runs were measured on."""
    for kind, name in PEAKS.items():
        rows = {row: found for row, found in recorded_rows(kind).items() if NOT_MEASURED not in found}
        taken = {run.name: rows[f"step {run.name}"] for run in RUNS if f"step {run.name}" in rows}
        if taken:
            runs = {run: (row["bytes"], row["seconds"]) for run, row in taken.items()}
            yield (
                kind,
                Gpu(f"our {kind.removeprefix('NVIDIA ')}", name, MEASURED, runs, _own_rates(machine(name), rows)),
            )


def _own_rates(ideal: Machine, rows: dict[str, dict[str, float]]) -> Machine | None:
    product = rows.get(kernel_name("matmul", "bf16", MATMUL_SIZES[-1]))
    traffic = rows.get(kernel_name("add", "f32 default", MOVE_SIZES[-1]))
    if product is None or traffic is None:
        return None
    reached = Efficiency(product["rate"] / ideal.peak("bf16"), traffic["rate"] / ideal.memory_bandwidth)
    return replace(ideal, efficiency=reached)

"""The GPUs that the six single-GPU runs are compared on: the published A5000, and those that we measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from course.machine import Machine
from course.machines import machine
from course.measured.rows import NOT_MEASURED, recorded_rows
from course.measured.single_device import PEAKS
from course.measured.validate import reached
from course.validation.single_device import RUNS

UVA = "P. Lippe, Training Models at Scale, University of Amsterdam, 2024"
MEASURED = "measured with `make validate-gpu`: course/measurements"
H100 = "NVIDIA H100 80GB HBM3"


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, with the memory and time of the runs on it.

    Attributes:
        name: First part of the names of its groups of figures.
        machine: The name of its machine.
        source: Source of the runs' figures.
        runs: Peak bytes and seconds per step of each run, by name.
        own_rates: Its machine, with the rates measured on the card as its factors; None if they were not measured.
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
        rows = {row: figures for row, figures in recorded_rows(kind).items() if NOT_MEASURED not in figures}
        step_rows = {run.name: rows.get(f"step {run.name}", {}) for run in RUNS}
        runs = {run: (row["bytes"], row["seconds"]) for run, row in step_rows.items() if row.get("bytes")}
        if runs:
            factors, name_of_group = reached(kind, rows), f"our {kind.removeprefix('NVIDIA ')}"
            own = factors and replace(machine(name), efficiency=factors)
            yield kind, Gpu(name_of_group, name, MEASURED, runs, own)

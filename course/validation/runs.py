"""Published runs, the planner's prediction of each, and the single factor per chip that is fitted to them."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from course.machine import Machine
from course.machines import machine, scaled
from course.planning import Choice, Estimate, Training, estimate
from course.planning.efficiency import Fitted, at_efficiency
from course.sizes import Sizes

PUBLISHED = Path(__file__).with_name("published.toml")
GPUS = 8  # per node


@dataclass(frozen=True)
class Run:
    """A published run: ``seconds`` per step, and ``memory`` of a device in bytes, 0 if the source has none."""

    paper: str
    name: str
    source: str
    machine: Machine
    sizes: Sizes
    batch: int
    choice: Choice
    training: Training
    seconds: float
    memory: float

    def estimate(self, efficiency: float = 1.0) -> Estimate:
        """The planner's prediction, at this fraction of the chip's peaks."""
        target = at_efficiency(self.machine, efficiency)
        return estimate(self.sizes, target, self.batch, self.choice, self.training)

    @property
    def reached(self) -> float:
        """The fraction of the peaks at which the prediction is right."""
        return self.estimate().seconds / self.seconds


def runs() -> list[Run]:
    """All runs in ``published.toml``."""
    tables = tomllib.loads(PUBLISHED.read_text()).values()
    return [
        _run(table, table.get("defaults", {}) | dict(zip(table["columns"], row, strict=True)))
        for table in tables
        for row in table["rows"]
    ]


def _run(table: dict[str, Any], row: dict[str, Any]) -> Run:
    def named(kind: type) -> dict[str, Any]:
        values = {field.name: row[field.name] for field in fields(kind) if field.name in row}
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}

    sizes, devices, batch = Sizes(**named(Sizes)), row["devices"], row["batch"]
    hardware = replace(machine(table["machine"]), **table.get("hardware", {}))
    choice = {"pipe": 1, "tensor": 1, "remat": "none"} | {k: row[k] for k in Choice._fields if k in row}
    choice["data"] = devices // choice["pipe"] // choice["tensor"]
    share = batch // choice["data"]
    choice["microbatches"] = share // row.get("microbatch", share)
    # Without a pipeline, every layer is a separate group unless the source says otherwise.
    choice.setdefault("repeats", sizes.layers if choice["pipe"] == 1 else 1)
    seconds, tokens = row.get("seconds", 0.0), batch * sizes.seq / devices
    if "tokens" in row:
        seconds = tokens / row["tokens"]
    elif "tflops" in row:
        d, layers, s = sizes.width, sizes.layers, sizes.seq
        seconds = (
            tokens * 96 * layers * d**2 * (1 + s / (6 * d) + sizes.vocab / (16 * layers * d)) / row["tflops"] / 1e12
        )
    memory = row.get("gb", 0) * 1e9 + row.get("gib", 0) * 2**30
    identity = table["paper"], row["name"], table["source"], scaled(hardware, devices, -(-devices // GPUS))
    return Run(*identity, sizes, batch, Choice(**choice), Training(**named(Training)), seconds, memory)


def factor(fitted_on: Iterable[Run]) -> float:
    """The factor that balances overestimated and underestimated runs: the geometric mean of the fractions reached."""
    return math.exp(fmean(math.log(run.reached) for run in fitted_on))


def others(run: Run, every: Iterable[Run]) -> list[Run]:
    """The runs of the same chip in other papers."""
    return [other for other in every if other.machine.device == run.machine.device and other.paper != run.paper]


def fit(every: list[Run]) -> dict[str, Fitted]:
    """The factor of each chip, with its spread, and the error on papers that it was not fitted to."""
    fitted = {}
    for device in dict.fromkeys(run.machine.device for run in every):
        own = [run for run in every if run.machine.device == device]
        reached, fitted_factor = [run.reached for run in own], factor(own)
        elsewhere = [(run, others(run, own)) for run in own]
        unseen = [abs(run.reached / factor(rest) - 1) for run, rest in elsewhere if rest]
        error = fmean(abs(share / fitted_factor - 1) for share in reached)
        papers = tuple(dict.fromkeys(run.paper for run in own))
        fitted_factor, least, most, error = (
            round(number, 4) for number in (fitted_factor, min(reached), max(reached), error)
        )
        fitted[device] = Fitted(
            fitted_factor, least, most, len(own), error, round(fmean(unseen), 4) if unseen else None, papers
        )
    return fitted

"""The planner compared with published runs, and the single factor per chip that is fitted to them.

``python -m course.validation.planner`` prints every run; ``--write`` fits the factors again and saves them, and the
planner's rows of the validation.
"""

from __future__ import annotations

import argparse
import math
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from course.machine import Machine
from course.machines import machine, scaled
from course.planning import Choice, Estimate, Training, estimate
from course.planning.efficiency import FILE, Fitted, at_efficiency, factors
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
        where = at_efficiency(self.machine, efficiency)
        return estimate(self.sizes, where, self.batch, self.choice, self.training)

    @property
    def reached(self) -> float:
        """The fraction of the peaks at which the prediction is right."""
        return self.estimate().seconds / self.seconds


def runs() -> list[Run]:
    """All of ``published.toml``."""
    tables = tomllib.loads(PUBLISHED.read_text()).values()
    return [
        _run(table, table.get("defaults", {}) | dict(zip(table["columns"], row, strict=True)))
        for table in tables
        for row in table["rows"]
    ]


def _run(table: dict[str, Any], row: dict[str, Any]) -> Run:
    def named(kind: type) -> dict[str, Any]:
        given = {field.name: row[field.name] for field in fields(kind) if field.name in row}
        return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}

    sizes, devices, batch = Sizes(**named(Sizes)), row["devices"], row["batch"]
    where = replace(machine(table["machine"]), **table.get("hardware", {}))
    given = {"pipe": 1, "tensor": 1, "remat": "none"} | {k: row[k] for k in Choice._fields if k in row}
    given["data"] = devices // given["pipe"] // given["tensor"]
    share = batch // given["data"]
    given["microbatches"] = share // row.get("microbatch", share)
    # Without a pipeline, every layer is a separate group unless the source says otherwise.
    given.setdefault("repeats", sizes.layers if given["pipe"] == 1 else 1)
    seconds, tokens = row.get("seconds", 0.0), batch * sizes.seq / devices
    if "tokens" in row:
        seconds = tokens / row["tokens"]
    elif "tflops" in row:
        d, layers, s = sizes.width, sizes.layers, sizes.seq
        seconds = (
            tokens * 96 * layers * d**2 * (1 + s / (6 * d) + sizes.vocab / (16 * layers * d)) / row["tflops"] / 1e12
        )
    memory = row.get("gb", 0) * 1e9 + row.get("gib", 0) * 2**30
    about = table["paper"], row["name"], table["source"], scaled(where, devices, -(-devices // GPUS))
    return Run(*about, sizes, batch, Choice(**given), Training(**named(Training)), seconds, memory)


def factor(fitted_on: Iterable[Run]) -> float:
    """The factor that balances overestimated and underestimated runs: the geometric mean of the fractions reached."""
    return math.exp(fmean(math.log(run.reached) for run in fitted_on))


def others(run: Run, every: Iterable[Run]) -> list[Run]:
    """The runs of the same chip in other papers."""
    return [one for one in every if one.machine.device == run.machine.device and one.paper != run.paper]


def fit(every: list[Run]) -> dict[str, Fitted]:
    """The factor of each chip, with its spread, and the error on papers that it was not fitted to."""
    found = {}
    for device in dict.fromkeys(run.machine.device for run in every):
        own = [run for run in every if run.machine.device == device]
        reached, one = [run.reached for run in own], factor(own)
        elsewhere = [(run, others(run, own)) for run in own]
        unseen = [abs(run.reached / factor(rest) - 1) for run, rest in elsewhere if rest]
        error = fmean(abs(share / one - 1) for share in reached)
        papers = tuple(dict.fromkeys(run.paper for run in own))
        one, least, most, error = (round(number, 4) for number in (one, min(reached), max(reached), error))
        found[device] = Fitted(one, least, most, len(own), error, round(fmean(unseen), 4) if unseen else None, papers)
    return found


def _keep() -> None:
    """Replace the planner's rows in the recorded validation."""
    from course.validation import report
    from course.validation.rows import PLANNED_MEMORY, PLANNED_TIME, planned

    kept = report.recorded()
    rest = [row for row in kept.rows if row.group not in (PLANNED_TIME, PLANNED_MEMORY)]
    report.keep(report.Recorded(kept.versions, [*rest, *planned(short=False)], kept.gaps))


def main() -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(prog="python -m course.validation.planner", description=__doc__)
    parser.add_argument("--write", action="store_true", help="fit the factors again, and keep them and the rows")
    write = parser.parse_args().write
    every = runs()
    if write:
        FILE.write_bytes(msgspec.json.format(msgspec.json.encode(fit(every)), indent=2) + b"\n")
        factors.cache_clear()
        _keep()
    for run in every:
        found = run.estimate(factors()[run.machine.device].factor)
        memory = f"{found.bytes / 1e9:6.1f} GB {found.bytes / run.memory - 1:+.1%}" if run.memory else ""
        seconds = f"{run.seconds:8.3f} s {found.seconds:8.3f} s {found.seconds / run.seconds - 1:+6.1%}"
        print(f"{run.paper:26} {run.name:34} {seconds}  {memory}")
    for device, found in factors().items():
        reached = f"{found.factor:.3f} of the peaks, single runs {found.lowest:.3f} to {found.highest:.3f}"
        unseen = "no other paper" if found.unseen is None else f"{found.unseen:.1%} on unseen papers"
        print(f"{device}: {reached}; mean error {found.error:.1%} over {found.runs} runs, {unseen}")


if __name__ == "__main__":
    main()

"""The planner compared with published runs, and the single factor per chip that is fitted to them.

``python -m course.validation.planner`` prints every run; ``--write`` fits the factors again and saves them, and the
planner's rows of the validation.
"""

from __future__ import annotations

import argparse

import msgspec

from course.planning.efficiency import FILE, factors
from course.validation import report
from course.validation.rows import PLANNED_MEMORY, PLANNED_TIME, planned
from course.validation.runs import fit, runs


def _keep() -> None:
    """Replace the planner's rows in the recorded validation."""
    record = report.recorded()
    rest = [row for row in record.rows if row.group not in (PLANNED_TIME, PLANNED_MEMORY)]
    report.keep(report.Recorded(record.versions, [*rest, *planned(short=False)], record.gaps))


def main() -> None:
    """Entry point of the command."""
    parser = argparse.ArgumentParser(prog="python -m course.validation.planner", description=__doc__)
    parser.add_argument("--write", action="store_true", help="fit the factors again, and keep them and the rows")
    write = parser.parse_args().write
    all_runs = runs()
    if write:
        FILE.write_bytes(msgspec.json.format(msgspec.json.encode(fit(all_runs)), indent=2) + b"\n")
        factors.cache_clear()
        _keep()
    for run in all_runs:
        estimate = run.estimate(factors()[run.machine.device].factor)
        memory = f"{estimate.bytes / 1e9:6.1f} GB {estimate.bytes / run.memory - 1:+.1%}" if run.memory else ""
        seconds = f"{run.seconds:8.3f} s {estimate.seconds:8.3f} s {estimate.seconds / run.seconds - 1:+6.1%}"
        print(f"{run.paper:26} {run.name:34} {seconds}  {memory}")
    for device, fitted in factors().items():
        reached = f"{fitted.factor:.3f} of the peaks, single runs {fitted.lowest:.3f} to {fitted.highest:.3f}"
        unseen = "no other paper" if fitted.unseen is None else f"{fitted.unseen:.1%} on unseen papers"
        print(f"{device}: {reached}; mean error {fitted.error:.1%} over {fitted.runs} runs, {unseen}")


if __name__ == "__main__":
    main()

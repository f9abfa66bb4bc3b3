"""The machines that programs are predicted for: ``machines.toml`` has their published figures, each with its source."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from course.machine import Efficiency, Link, Machine

# Of the array, what each of eight devices sends in a collective.
_SENT = {"all_gather": 7 / 8, "reduce_scatter": 7 / 8, "all_reduce": 14 / 8, "all_to_all": 7 / 8}


def _machine(name: str, table: dict[str, Any], notes: dict[str, str]) -> Machine:
    """A machine of its table in the file."""
    figures = {key: value for key, value in table.items() if key not in ("like", "link_rates")}
    rates = {
        kind: tuple((kib * 1024.0, _SENT.get(kind, 1) * gb * 1e9) for kib, gb in points)
        for kind, points in table.get("link_rates", {}).items()
    }
    figures["links"] = tuple(Link(**link, rates=rates) for link in table["links"])
    figures["efficiency"] = Efficiency(**table.get("efficiency", {}))
    figures["matmul_rates"] = tuple((2 * side**3, tera * 1e12) for side, tera in table.get("matmul_rates", ()))
    figures["sources"] = {what: text.format(**notes) for what, text in table["sources"].items()}
    return Machine(name, **figures)


def _machines() -> tuple[Machine, ...]:
    data = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    tables: dict[str, dict[str, Any]] = {}
    for name, own in data["machines"].items():
        base = tables.get(own.get("like"), {})
        tables[name] = {**base, **own, "sources": base.get("sources", {}) | own["sources"]}
    return tuple(_machine(name, table, data["notes"]) for name, table in tables.items())


MACHINES = _machines()
A5000, A100, TWO_A100, H100, H100_CALIBRATED, H200, TPU_V5E = MACHINES

# Compute alone takes time: what a schedule leaves idle is then all that is left to see. No program runs on it, so it is
# in no list of machines.
FREE_NETWORK = Machine(
    name="free network",
    device="none: 1 TFLOP/s of matrix products, everything else at no cost",
    num_devices=64,
    matmul_flops={"bf16": 1e12, "f16": 1e12, "f32": 1e12},
    vector_flops=1e30,
    memory_bytes=1e12,
    memory_bandwidth=1e30,
    links=(Link("free", 64, 1e30, 0.0),),
)


def machine(name: str) -> Machine:
    """The machine of that name, whatever its case.

    Raises:
        LookupError: There is none; the message lists those that exist.
    """
    for found in (*MACHINES, FREE_NETWORK):
        if found.name.lower() == name.lower():
            return found
    raise LookupError(f"no machine is called {name!r}; there are: {', '.join(m.name for m in MACHINES)}")

"""The result for each program of the corpus, stored with the versions that it depends on."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).parent / "results.json"
MACHINE = "8xH100"
_PACKAGES = ("jax", "jaxlib", "flax", "optax")


@dataclass(frozen=True)
class Row:
    """The result for a program.

    Attributes:
        name, repository, commit, path, function, style: Identity of the program.
        refused: The message if it cannot be priced; empty if it was accepted.
        devices: Number of devices it is for.
        operations: Number of operations as written.
        flops, xla_flops: FLOPs of a device, each loop's body once: ours, and those of XLA's own cost analysis.
        temporaries, compiled_temporaries: Bytes: by liveness, and as the deviceless GPU compiler assigned them.
        seconds, replayed: Seconds per step: the timeline's, and that compiler's schedule replayed.
        compiled_reason: Why there is no result of that compiler.
    """

    name: str
    repository: str
    commit: str
    path: str
    function: str
    style: str
    refused: str = ""
    devices: int = 0
    operations: int = 0
    flops: float = 0.0
    xla_flops: float = 0.0
    temporaries: int = 0
    compiled_temporaries: int | None = None
    seconds: float = 0.0
    replayed: float | None = None
    compiled_reason: str = ""

    @property
    def accepted(self) -> bool:
        """True if it can be priced."""
        return self.devices > 0

    @property
    def flops_error(self) -> float:
        """Error of the FLOPs, relative to XLA's."""
        return self.flops / self.xla_flops - 1

    @property
    def memory_error(self) -> float | None:
        """Error of the temporaries, relative to the compiler's; None if the compiler has hardly any."""
        return self.temporaries / self.compiled_temporaries - 1 if self.compiled_temporaries else None

    @property
    def time_error(self) -> float | None:
        """Error of the step's time, relative to the replay of the compiler's schedule."""
        return self.seconds / self.replayed - 1 if self.replayed else None


def recorded() -> list[Row]:
    """The recorded table."""
    return [Row(**row) for row in json.loads(RESULTS.read_text())["rows"]]


def keep(row: Row, order: list[str]) -> None:
    """Replace a program's row in the table; rows are ordered by the names in ``order``."""
    found = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    by_name = {old["name"]: old for old in found} | {row.name: asdict(row)}
    versions = {name: version(name) for name in _PACKAGES}
    rows = [by_name[name] for name in order if name in by_name]
    RESULTS.write_text(json.dumps({"versions": versions, "machine": MACHINE, "rows": rows}, indent=1) + "\n")

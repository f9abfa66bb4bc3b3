"""What came out for each program of the corpus, kept with the versions that it depends on."""

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
    """What came out for a program.

    Attributes:
        name, repository, commit, path, function, style: Which it is.
        refused: The sentence, where it has no price; empty where it was accepted.
        devices: That it is for.
        operations: As written.
        flops, xla_flops: Of a device, each loop's body once: ours, and those of XLA's own cost analysis.
        temporaries, compiled_temporaries: Bytes: by liveness, and as the deviceless GPU compiler assigned them.
        seconds, replayed: Of a step: the timeline's, and that compiler's schedule replayed.
        compiled_reason: Why there is nothing of that compiler.
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
        """Whether it has a price."""
        return self.devices > 0

    @property
    def flops_error(self) -> float:
        """Of the FLOPs, relative to XLA's."""
        return self.flops / self.xla_flops - 1

    @property
    def memory_error(self) -> float | None:
        """Of the temporaries, relative to the compiler's; None where it has none to speak of."""
        return self.temporaries / self.compiled_temporaries - 1 if self.compiled_temporaries else None

    @property
    def time_error(self) -> float | None:
        """Of the step, relative to the replay of the compiler's schedule."""
        return self.seconds / self.replayed - 1 if self.replayed else None


def recorded() -> list[Row]:
    """The table that was kept."""
    return [Row(**row) for row in json.loads(RESULTS.read_text())["rows"]]


def keep(row: Row, order: list[str]) -> None:
    """Put a row into the table in place of its older one; rows follow the names of ``order``."""
    found = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    by_name = {old["name"]: old for old in found} | {row.name: asdict(row)}
    versions = {name: version(name) for name in _PACKAGES}
    rows = [by_name[name] for name in order if name in by_name]
    RESULTS.write_text(json.dumps({"versions": versions, "machine": MACHINE, "rows": rows}, indent=1) + "\n")

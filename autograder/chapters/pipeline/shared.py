"""What the functions of ``pipeline`` share: how long a pass lasts, and what is sent in it."""

from __future__ import annotations

import numpy as np

from autograder.contract.cases import microbatch_bytes, stages_of
from autograder.contract.draws import axis_names
from autograder.contract.facts import worst
from autograder.contract.task import Case, Evidence
from autograder.contract.verdict import Fact

OTHER = "other collectives"
PERMUTES = "permute bytes"


def ticks_of(case: Case) -> int:
    """Stage times of a forward pass: every microbatch enters, and the last one passes all stages."""
    return case.sizes["microbatches"] + stages_of(case) - 1


def passed_on(e: Evidence, passes: int) -> float:
    """What a stage sends if it sends at every tick, in so many passes over the schedule."""
    return 0.0 if stages_of(e.case) == 1 else float(passes * ticks_of(e.case) * microbatch_bytes(e.case))


def needed(e: Evidence, passes: int) -> float:
    """What it sends if it sends its microbatches alone.

    Of two stages one may send forward alone, and the other backward alone.
    """
    alone = (passes + 1) // 2 if stages_of(e.case) == 2 else passes
    return 0.0 if stages_of(e.case) == 1 else float(alone * e.case.sizes["microbatches"] * microbatch_bytes(e.case))


def stage_seconds(case: Case) -> float:
    """What the matmul of ``stage_of`` takes on the machine with a free network, at 1 TFLOP/s."""
    return 2 * case.sizes["rows"] * case.sizes["width"] ** 2 / 1e12


def unseen_stages(rng: np.random.Generator, *sizes: tuple[int, ...]) -> dict[str, int]:
    """A mesh of one of these sizes whose axes have names that nobody knows; the last one is that of the stages."""
    chosen = sizes[rng.integers(len(sizes))]
    return dict(zip(axis_names(rng, len(chosen)), chosen, strict=True))


def refused(name: str, cases: list[Evidence], what: str, hint: str) -> Fact:
    """The leaf ``refused`` of the results says that ``refuses`` was true."""
    found = []
    for e in cases:
        flag = e.measured.get("refused")
        passed = flag is not None and flag.shape == () and bool(flag == np.True_)
        message = "" if passed else (
            f"on mesh {e.case.mesh_text} the function was given {what}, and raised no ValueError that names both "
            f"numbers. {hint}")  # fmt: skip
        found.append(Fact(name, passed, "refused" if passed else "not refused", "refused", case=e.case.name,
                          line="" if passed else e.line, message=message))  # fmt: skip
    return worst(found)

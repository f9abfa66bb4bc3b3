"""What the functions of ``pipeline`` share: where the stages are, how long a pass lasts, and what one stage does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autograder.cases import microbatch_bytes, pipe_of, stages_of
from autograder.contract import Case, Evidence
from autograder.facts import worst
from autograder.verdict import Fact

OTHER = "other collectives"
PERMUTES = "permute bytes"


def others_of(case: Case) -> tuple[str, ...]:
    """The axes along which the rows of a batch are split: all but that of the stages."""
    return tuple(axis for axis in case.mesh if axis != pipe_of(case))


def groups_of(case: Case) -> int:
    """How many pipelines there are side by side, each with rows of its own."""
    return math.prod(case.mesh[axis] for axis in others_of(case))


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


# --8<-- [start:stage]
def stage_of(weights: jax.Array) -> Callable[..., jax.Array]:
    """A stage that gives every microbatch another result: ``[microbatch_size, width] -> `` the same."""

    def stage(x, microbatch):
        return x + (1 + jnp.asarray(microbatch).astype(x.dtype) / 8) * jnp.tanh(x @ weights)

    return stage


# --8<-- [end:stage]


def stage_seconds(case: Case) -> float:
    """What the matmul of ``stage_of`` takes on the machine with a free network, at 1 TFLOP/s."""
    return 2 * case.sizes["rows"] * case.sizes["width"] ** 2 / 1e12


def refuses(call: Callable[[], Any], *numbers: int) -> bool:
    """Whether ``call`` raises a ``ValueError`` that names the numbers; nothing of it enters the program."""
    try:
        jax.eval_shape(call)
    except ValueError as error:
        return all(str(number) in str(error) for number in numbers)
    except Exception:
        return False
    return False


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

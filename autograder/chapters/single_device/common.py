"""What the tasks of ``single_device`` share: a mesh of one device, and checks of what a function returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder import facts, forms
from autograder.contract import Case, Evidence, Mismatch, Wrapped
from autograder.verdict import Fact
from course.mesh import abstract_mesh

MESH = {"data": 1}


def on_one_device(local: Callable[..., dict[str, Any]], inputs: dict[str, Any], results: tuple[str, ...]) -> Wrapped:
    """``local``, which takes ``inputs`` by name and gives ``results``, inside ``shard_map`` over one device."""

    def program(**trees):
        def ordered(*blocks):
            return local(**dict(zip(inputs, blocks, strict=True)))

        given = [trees[name] for name in inputs]
        specs = (P(),) * len(inputs)
        out_specs = dict.fromkeys(results, P())
        return jax.shard_map(ordered, mesh=abstract_mesh(MESH), in_specs=specs, out_specs=out_specs)(*given)

    return Wrapped(program, inputs, dict.fromkeys(inputs, P()), dict.fromkeys(results, P()), {"params": "state"})


def float32_scalar(name: str, loss: Any) -> Any:
    """``loss``, if it is one.

    Raises:
        Mismatch: It is not.
    """
    if getattr(loss, "shape", None) != () or loss.dtype != np.float32:
        raise Mismatch(f"{name} returned {forms.describe(loss)}, expected a scalar, float32[]")
    return loss


def like(name: str, found: Any, expected: Any, case: Case) -> Any:
    """``found``, if it is an array like ``expected``.

    Raises:
        Mismatch: It is not.
    """
    if (getattr(found, "shape", None), getattr(found, "dtype", None)) != (expected.shape, expected.dtype):
        raise Mismatch(
            f"{name} returned {forms.describe(found)}, expected {forms.describe(expected)} in the case {case.name}"
        )
    return found


def does_not_grow(cases: list[Evidence], small: str, large: str, what: str, hint: str) -> Fact:
    """The Program has as many operations in the case ``large`` as in ``small``, if both were looked at."""
    found = {e.case.name: e for e in cases}
    if small in found and large in found:
        return facts.same_program_size("program size", found[small], found[large], what, hint)
    return Fact("program size", None, "not measured", message=f"this check leaves out {small} or {large}")

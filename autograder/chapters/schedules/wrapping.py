"""What the functions of ``schedules`` are given, and the form of what they give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from autograder.contract.case import Case, Sizes
from autograder.contract.case_builders import axis_of, axis_size
from autograder.contract.output_checks import describe
from autograder.contract.wrapping import Mismatch, Wrapped, Wrapping, on_mesh
from course.mesh import as_varying


@dataclass(frozen=True, kw_only=True)
class Rows(Sizes):
    """Each device's rows, ``[rows, width]``."""

    rows: int
    width: int


def _wrap(function: Any, case: Case[Rows]) -> Wrapped:
    axis, width = axis_of(case), case.sizes.width

    def local(x):
        mean = function(x, axis)
        if getattr(mean, "shape", None) != (width,) or mean.dtype != np.float32:
            raise Mismatch(f"schedules_mean gives {describe(mean)}, expected float32[{width}]")
        return {"values": as_varying(mean, axis)[None]}

    x = jax.ShapeDtypeStruct((axis_size(case) * case.sizes.rows, width), np.float32)
    return on_mesh(local, case, {"x": (x, P(axis))}, {"values": P(axis)})


WRAPPINGS = (Wrapping("schedules_mean", "(x, axis_name)", _wrap, Rows),)

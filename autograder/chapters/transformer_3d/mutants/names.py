"""The facts of ``transformer_3d`` by name, and answers that are the reference but for a part."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

VALUES, GRADIENTS, NORM = "values", "gradients", "gradient norm"
WRONG = (VALUES, GRADIENTS, NORM)
SPLIT, STATE, SENT = "split dims", "state bytes per device", "communication"
LOW = "bfloat16 products"
TEMPORARIES, EXPOSED = "live temporaries", "exposed over data"
GATHERED, SCATTERED = "all-gather bytes over data", "reduce-scatter bytes over data"
PERMUTED, SUMMED, PIECES = "permute bytes over pipe", "all-reduce bytes", "transfers in one piece"


def but(function: Callable[..., Any], **parts: Any) -> Callable[..., Any]:
    """The function with other things by these names in its module."""
    assert isinstance(function, FunctionType) and set(parts) <= set(function.__globals__)
    return FunctionType(function.__code__, {**function.__globals__, **parts}, function.__name__)

"""Functions that JAX exports by name, such as ``erf``, each with its decomposition.

Compilers use either the name or the decomposition; the analyses read the latter. So it must be what
JAX writes: arithmetic on each element, or for ``top_k`` a sort and slices of it.
"""

from __future__ import annotations

from typing import Any

from jax.extend.mlir import ir

from course.program.ir import ELEMENTWISE
from course.program.program import ProgramError

COMPOSITE = "stablehlo.composite"
# Attributes of a composite.
NAMED = {"name", "decomposition", "version", "composite_attributes"}
_ARITHMETIC = set("acos acosh asin asinh atanh cosh erf sinh".split())
_SORTS = [f"stablehlo.{kind}" for kind in ("iota", "sort", "slice", "slice")] + ["func.return"]


def called(op: Any) -> str:
    """The function that an operation represents, which readers inline instead; empty for any other operation."""
    if op.name not in ("func.call", COMPOSITE):
        return ""
    return op.attributes["callee" if op.name == "func.call" else "decomposition"].value


def check_composite(op: Any, function: Any) -> None:
    """Raise ``ProgramError`` unless the composite is known and ``function`` has the form that JAX writes."""
    dialect, _, name = op.attributes["name"].value.partition(".")
    if dialect != "chlo" or name not in _ARITHMETIC | {"top_k"}:
        raise ProgramError(
            f"function {op.attributes['name'].value[:80]} is not allowed, because its cost is unknown; write it "
            "with other operations"
        )
    inner = [operation.operation for operation in function.regions[0].blocks[0].operations]
    kinds = [operation.name for operation in inner]
    if name == "top_k":
        formed = kinds == _SORTS and inner[1].operands[0] == function.regions[0].blocks[0].arguments[0]
    else:
        shapes = {
            tuple(ir.RankedTensorType(value.type).shape) for operation in (op, *inner) for value in operation.results
        }
        arithmetic = {f"stablehlo.{kind}" for kind in ELEMENTWISE} | {"stablehlo.constant", "func.return"}
        formed = set(kinds) <= arithmetic and len(shapes) == 1
    if not formed:
        raise ProgramError(f"function {name} consists of other operations than those that JAX uses for it")

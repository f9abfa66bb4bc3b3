"""One operation of StableHLO in plain Python: its kind, its attributes and the types of its values."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from jax.extend.mlir import ir

from course.program.foreign import LIKE, rows_of_axes
from course.program.ir import FUNCTIONS, KNOWN, LIBRARY, Value, unsupported
from course.program.rules import function_name, source_line

_ZERO = re.compile(r"dense<(false|0|0\.0+e[+-]00)>")
_NUMPY = {"i1", "i8", "i16", "i32", "i64", "ui8", "ui16", "ui32", "ui64", "f32", "f64"}


def kind_of(op: Any, line: str, lenient: bool) -> str:
    """StableHLO's name of an operation, without its prefix, or the name that it counts as.

    Raises:
        ProgramError: No analysis can price it.
    """
    dialect, _, kind = op.name.partition(".")
    if dialect == "chlo" and kind == "erf":
        return "erf"
    if lenient and kind in (LIBRARY if dialect == "stablehlo" else FUNCTIONS | {"erf"}):
        return kind
    if lenient and op.name in LIKE:
        return LIKE[op.name]
    if dialect != "stablehlo" or kind not in KNOWN:
        target = f" {op.attributes['call_target_name']}" if kind == "custom_call" else ""
        name = f"{op.name}{target} (of {function_name(op)})" if function_name(op) and lenient else f"{op.name}{target}"
        ways = ", or ask the GPU compiler (aot=True, --aot)" if lenient else ""
        raise unsupported(None, line, f"the analyses cannot price {name}; write it with other operations{ways}")
    return kind


def check_groups(op: Any, kind: str, line: str) -> None:
    """Check that groups count devices as jax does; in XLA's other notations, the numbers have other meanings."""
    handle = (
        re.search(r"handle = (\d+)", str(op.attributes["channel_handle"]))
        if "channel_handle" in op.attributes
        else None
    )
    counted = "use_global_device_ids" in op.attributes or kind not in ("all_gather", "all_reduce", "reduce_scatter")
    if handle is None or int(handle[1]) < 1 or not counted:
        raise unsupported(None, line, f"{kind} does not give its groups as global device numbers")


def attributes_of(op: Any, meshes: dict[str, Any]) -> dict[str, Any]:
    """The attributes that analyses read, as Python values; groups given by axes of ``meshes`` become device numbers."""
    attributes: dict[str, Any] = {}
    if op.name == "stablehlo.constant" and "complex<" in str(op.results[0].type):
        return {}  # MLIR's Python cannot read them, and no analysis needs to
    for name, attribute in op.attributes.items():
        if name == "value":
            kind = ir.RankedTensorType(op.results[0].type)
            if str(kind.element_type) in _NUMPY:
                numbers = _numbers(attribute)
                if numbers.size:
                    attributes["signs"] = tuple(
                        _sign(number) for number in (numbers.flat[0], numbers.min(), numbers.max())
                    )
                if math.prod(kind.shape) <= 4096:
                    attributes[name] = np.broadcast_to(numbers, tuple(kind.shape))
            attributes["zero"] = bool(_ZERO.match(str(attribute)[:40]))
        elif name == "source_target_pairs":
            attributes[name] = np.array(attribute).reshape(-1, 2)
        elif name == "replica_groups" and "mesh_axes" in str(attribute) and meshes:
            attributes[name] = rows_of_axes(
                str(attribute), {name: str(op.attributes["mesh"]) for name, op in meshes.items()}
            )
        elif name == "replica_groups" and "sub_axis" in str(attribute):
            raise unsupported(None, source_line(op), f"{op.name} runs over a part of a mesh axis; use whole axes")
        elif name == "replica_groups" and "mesh_axes" in str(attribute):
            attributes["replica_axes"] = tuple(re.findall(r'axis_ref<name = "([^"]+)"', str(attribute)))
        elif name == "replica_groups":
            attributes[name] = np.array(attribute)
        elif isinstance(attribute, ir.DenseI64ArrayAttr | ir.DenseBoolArrayAttr):
            attributes[name] = tuple(attribute)
        elif isinstance(attribute, ir.IntegerAttr | ir.BoolAttr):
            attributes[name] = attribute.value
        else:
            attributes[name] = str(attribute)
    return attributes


def _numbers(attribute: Any) -> np.ndarray:
    """The numbers of a constant; only one if all are equal, however many the text claims."""
    if not attribute.is_splat:
        return np.array(attribute)
    with ir.Location.unknown(attribute.context):
        scalar = ir.RankedTensorType.get([], attribute.type.element_type)
    return np.array(ir.DenseElementsAttr.get_splat(scalar, attribute.get_splat_value()))


def _sign(number: Any) -> str:
    plain = isinstance(number, np.bool_) or not np.isfinite(number)
    return str(number if plain else np.sign(number).astype(int))


def value_of(kind: Any) -> Value:
    """A value of an MLIR type."""
    text = str(kind)
    if not text.startswith("tensor<"):
        return Value((), text, 0)
    tensor = ir.RankedTensorType(kind)
    element = str(tensor.element_type)
    digits = re.search(r"(\d+)", element)
    bits = int(digits[1]) if digits else 8
    if element.startswith("complex"):
        bits *= 2
    return Value(tuple(tensor.shape), element, 8 if element == "i1" else bits)

"""The allowed contents of a Program's module: rules that are checked before any analysis or compiler reads it.

Lists say what is allowed, and everything else is refused by name: a compiler reads more into a module than an analysis
can, such as attributes that change how an operation is compiled, and crashes on unusual input.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
from jax.extend.mlir import ir

from course.program.composites import COMPOSITE, NAMED, called, check_composite
from course.program.ir import COLLECTIVES, ELEMENTWISE, KNOWN
from course.program.program import DTYPES, MAX_VALUE_BYTES, Program, ProgramError

# ``cell:line``, and the function that is called there, such as ``jnp.roll``; empty where unknown.
Place = tuple[str, str]
NOWHERE: Place = ("", "")
MAX_OPS = 200_000
MAX_DEPTH = 200
MAX_RANK = 32
MAX_CONSTANT_BYTES = 2**20
# Limits on operations in a function that is applied to each element: a reduction's, and one without a price (a sort's).
MAX_APPLIED = 1000
MAX_UNCHARGED = 64
CUSTOM_CALLS: set[str] = set()
OPERATIONS = {f"stablehlo.{kind}" for kind in KNOWN - {"erf"}} | {
    "chlo.erf",
    "func.func",
    "func.return",
    "func.call",
    "sdy.mesh",
    "sdy.manual_computation",
    "sdy.sharding_constraint",
    "sdy.return",
}
ATTRIBUTES = set(
    "algorithm all_gather_dim base_dilations broadcast_dimensions callee channel_handle compare_type "
    "comparison_direction concat_dimension dimension dimension_numbers dimensions dot_dimension_numbers "
    "edge_padding_high edge_padding_low exponent_bits in_shardings indices_are_sorted interior_padding iota_dimension "
    "is_stable limit_indices manual_axes mantissa_bits out_shardings padding permutation precision_config "
    "replica_groups result_accuracy rng_algorithm scatter_dimension scatter_dimension_numbers sharding slice_sizes "
    "source_target_pairs split_count split_dimension start_indices strides unique_indices use_global_device_ids value "
    "window_dilations window_dimensions window_strides".split()
)
# Attributes of a module, a mesh and a function, and of the functions' arguments and results.
_DECLARED = {
    "builtin.module": {"sym_name", "mhlo.num_partitions", "mhlo.num_replicas", "jax.uses_shape_polymorphism"},
    "sdy.mesh": {"sym_name", "mesh", "stablehlo.mesh"},
    "func.func": {"sym_name", "sym_visibility", "function_type", "arg_attrs", "res_attrs"},
}
DONATED = {"jax.buffer_donor", "tf.aliasing_output"}
_ARGUMENT = {"sdy.sharding", "jax.result_info", *DONATED}
_ELEMENT = r"i1|u?i(?:2|4|8|16|32|64)|f16|bf16|f32|f64|f8E\w+|f4E\w+|f6E\w+|complex<f32>|complex<f64>"
_FRAME = re.compile(r'"((?:[^"\\]|\\.)+)":(\d+)(?::\d+)?')
# ``jnp.linalg.inv: jit(inv)``, or ``transpose(jvp(jit(inv)))`` alone.
_NAMED = re.compile(r'loc\("(?:([\w.]+): )?[^"]*?(\w*)\W*"')
# Operations whose regions run as separate blocks; every other region is applied to single elements.
_HOLDERS = {"stablehlo.while", "stablehlo.case", "sdy.manual_computation"}
_APPLIED = ELEMENTWISE | {"constant", "reshape", "return"}
_TENSOR = re.compile(rf"tensor<((?:\d+x)*)({_ELEMENT})>")


def operations(op: Any, depth: int = 0) -> Iterator[Any]:
    """Every MLIR operation inside ``op``, in order. MLIR's own walk turns exceptions into others.

    Raises:
        ProgramError: They nest too deep.
    """
    if depth > MAX_DEPTH:
        raise ProgramError(f"the program nests more than {MAX_DEPTH} deep")
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from operations(inner.operation, depth + 1)


def check_module(module: Any, program: Program) -> None:
    """Raise ``ProgramError`` if the module contains anything that is not known to be harmless.

    Functions that are never called are checked like all others; compilers leave them out.
    """
    _check_declared(module, _DECLARED["builtin.module"], "the module")
    _check_numbers(module, program)
    functions: dict[str, Any] = {}
    for top in (op.operation for op in module.regions[0].blocks[0].operations):
        if top.name == "sdy.mesh":
            check_mesh(top, program.mesh)
        elif top.name != "func.func":
            raise ProgramError(
                f"{top.name} is next to the program's functions; only functions and meshes are allowed there"
            )
        else:
            functions[_text(top.attributes["sym_name"])] = top
        _check_declared(top, _DECLARED[top.name], top.name)
    _check_functions(functions, program)
    callers = _check_calls(functions)
    for name, function in functions.items():
        for op in operations(function):
            with at_line(op, callers.get(name, NOWHERE)):
                _check_operation(op, name, program)
                if op.name == COMPOSITE:
                    check_composite(op, functions[called(op)])
                if op.regions and op.name not in _HOLDERS:
                    _check_applied(op, functions)


@contextmanager
def at_line(op: Any, caller: Place = NOWHERE) -> Iterator[None]:
    """Make a ``ProgramError`` name the operation's line and function, or those of its caller."""
    try:
        yield
    except ProgramError as error:
        line, function = place(op, caller)
        raise ProgramError(f"in {function}: {error}" if function else str(error), line or None) from None


def place(op: Any, caller: Place = NOWHERE) -> Place:
    """The line and the function of an operation, as far as known; those of its caller if the line is not."""
    line = source_line(op)
    return (line, function_name(op)) if line else caller


def _check_numbers(module: Any, program: Program) -> None:
    expected_values = {
        "mhlo.num_partitions": program.num_devices,
        "mhlo.num_replicas": 1,
        "jax.uses_shape_polymorphism": False,
    }
    for name, expected in expected_values.items():
        value = module.attributes[name].value if name in module.attributes else None
        if value is not None and value != expected:
            raise ProgramError(f"the module's {name}: found {value}, expected {expected}")


def check_mesh(op: Any, mesh: dict[str, int]) -> None:
    """Raise ``ProgramError`` unless the module declares the Program's mesh, with devices in order."""
    text = str(op.attributes["mesh"])
    axes = ", ".join(f'"{axis}"={size}' for axis, size in mesh.items())
    if text != f"#sdy.mesh<[{axes}]>" and text != "#sdy.mesh<[]>":
        raise ProgramError(f"the artefact is for mesh {text[:200]} and the Program says {mesh}")


def _check_declared(op: Any, allowed: set[str], owner: str) -> None:
    for name in op.attributes:
        if name not in allowed:
            raise ProgramError(f"{owner} has attribute {name[:80]!r}, which is not allowed")


def _check_functions(functions: dict[str, Any], program: Program) -> None:
    if "main" not in functions:
        raise ProgramError("the module has no function main")
    for name, function in functions.items():
        if len(function.regions[0].blocks) != 1:
            raise ProgramError(f"function {name[:80]} has {len(function.regions[0].blocks)} blocks, expected one")
        for attribute_name in ("arg_attrs", "res_attrs"):
            all_attributes = function.attributes.get(attribute_name, ())
            for key in (key for attributes in all_attributes for key in _names(attributes)):
                if key not in _ARGUMENT:
                    raise ProgramError(f"function {name[:80]} has {attribute_name} {key[:80]!r}, which is not allowed")
    main = functions["main"]
    block = main.regions[0].blocks[0]
    results = block.operations[len(block.operations) - 1].operands
    _check_types("input", [argument.type for argument in block.arguments], program.inputs)
    _check_types("output", [result.type for result in results], program.outputs)
    argument_attributes = main.attributes.get("arg_attrs", [])
    donated = {i for i, attributes in enumerate(argument_attributes) if DONATED & set(_names(attributes))}
    if donated != set(program.donated):
        raise ProgramError(f"the module donates inputs {sorted(donated)} and the header has {sorted(program.donated)}")


def _names(attributes: Any) -> list[str]:
    return [attributes[i].name for i in range(len(attributes))]


def _check_types(direction: str, types: list[Any], leaves: Any) -> None:
    if len(types) != len(leaves):
        raise ProgramError(f"the module's number of {direction}s: found {len(types)}, expected {len(leaves)}")
    for kind, leaf in zip(types, leaves, strict=True):
        expected = f"tensor<{''.join(f'{dim}x' for dim in leaf.shape)}{DTYPES[leaf.dtype]}>"
        if str(kind) != expected:
            raise ProgramError(f"the module's {direction} {leaf.name}: found {str(kind)[:80]}, expected {expected}")


def _check_calls(functions: dict[str, Any]) -> dict[str, Place]:
    """The location that calls each function.

    Raises:
        ProgramError: A function calls itself or one that does not exist, or calls produce more operations than can be
            analysed.
    """
    own: dict[str, int] = {}
    calls: dict[str, list[Any]] = {}
    for name, function in functions.items():
        ops = list(operations(function))
        own[name], calls[name] = len(ops), [op for op in ops if called(op)]
    sizes: dict[str, int] = {}
    lines: dict[str, Place] = {}

    def size(name: str, above: tuple[str, ...]) -> int:
        if name not in functions:
            raise ProgramError(f"the program calls function {name[:80]!r}, which does not exist")
        if name in above:
            raise ProgramError(f"function {name[:80]} calls itself, and no compiler can inline that")
        if len(above) > MAX_DEPTH:
            raise ProgramError(f"calls nest more than {MAX_DEPTH} deep")
        if name not in sizes:
            sizes[name] = own[name]
            for call in calls[name]:
                callee = called(call)
                lines.setdefault(callee, place(call, lines.get(name, NOWHERE)))
                sizes[name] += size(callee, (*above, name))
        return sizes[name]

    if max(size(name, ()) for name in ("main", *functions)) > MAX_OPS:
        raise ProgramError(f"the program has more than {MAX_OPS:,} operations; use lax.scan instead of unrolling")
    return lines


def _check_operation(op: Any, function: str, program: Program) -> None:
    kind = op.name.partition(".")[2]
    if op.name == "stablehlo.custom_call":
        target = _text(op.attributes["call_target_name"])
        if target not in CUSTOM_CALLS:
            raise ProgramError(f"the program calls {target[:80]!r}, which is not allowed: it would run outside of XLA")
    elif op.name not in OPERATIONS and op.name != COMPOSITE:
        raise ProgramError(f"operation {op.name} is not allowed, because its cost is unknown")
    elif strange := [name for name in op.attributes if name not in (NAMED if op.name == COMPOSITE else ATTRIBUTES)]:
        named = repr(strange[0][:80])
        raise ProgramError(f"{op.name} has attribute {named}, which is not allowed: a compiler could act on it")
    if any(len(region.blocks) != 1 for region in op.regions):
        raise ProgramError(f"{op.name} has a region that is not one block")
    for value in [*op.results, *(a for region in op.regions for a in region.blocks[0].arguments)]:
        check_type(str(value.type))
    if kind == "constant":
        check_constant(op)
    elif kind in COLLECTIVES:
        _check_devices(op, program.num_devices)
    elif "algorithm" in op.attributes:
        _check_algorithm(op)
    elif "result_accuracy" in op.attributes and "DEFAULT" not in str(op.attributes["result_accuracy"]):
        raise ProgramError(f"{op.name} asks for an accuracy of its own, which only some devices respect; leave it out")
    elif kind == "manual_computation" and (function != "main" or op.parent.name != "func.func"):
        raise ProgramError("a shard_map is inside another operation; write it at the outermost level")


def _check_algorithm(op: Any) -> None:
    """Check that a product's algorithm is for an operand's dtype: JAX multiplies float32 by bfloat16 in bfloat16."""
    algorithm_dtypes = re.findall(r"[lr]hs_precision_type = (\w+)", str(op.attributes["algorithm"]))
    operand_dtypes = [str(ir.ShapedType(operand.type).element_type) for operand in op.operands]
    if not {*algorithm_dtypes} <= {*operand_dtypes}:
        raise ProgramError(
            f"a product of {' and '.join(operand_dtypes)} asks for an algorithm of {' and '.join(algorithm_dtypes)}, "
            "which only some devices have: cast the operands instead"
        )


def _check_devices(op: Any, count: int) -> None:
    """Check that groups contain every device once, and that a permute has each source and each target once."""
    channel = (
        re.search(r"type = (\d+)", str(op.attributes["channel_handle"])) if "channel_handle" in op.attributes else None
    )
    if channel and channel[1] not in "01":
        raise ProgramError(f"{op.name} is of channel type {channel[1]}, expected one between devices")
    if "source_target_pairs" in op.attributes:
        pairs = np.array(op.attributes["source_target_pairs"]).reshape(-1, 2)
        for role, devices in (("sources", pairs[:, 0]), ("targets", pairs[:, 1])):
            if len(set(devices.tolist())) != len(devices) or not all(0 <= d < count for d in devices.tolist()):
                wrong = f"the {role} of {op.name} are {devices.tolist()[:20]}"
                raise ProgramError(f"{wrong}, expected devices from 0 to {count - 1}, each once")
    elif isinstance(op.attributes["replica_groups"], ir.DenseElementsAttr):
        devices = np.array(op.attributes["replica_groups"]).flatten().tolist()
        if sorted(devices) != list(range(count)):
            wrong = f"the groups of {op.name} contain devices {devices[:20]}"
            raise ProgramError(f"{wrong}, expected each from 0 to {count - 1} once")


def _check_applied(op: Any, functions: dict[str, Any]) -> None:
    """Check that a reduction, a sort or a scatter applies arithmetic on single numbers: its price follows from that."""
    limit = MAX_APPLIED if op.name in ("stablehlo.reduce", "stablehlo.reduce_window") else MAX_UNCHARGED
    count = sum(_check_arithmetic(op, region.blocks[0], functions, limit) for region in op.regions)
    if count > limit:
        raise ProgramError(f"{op.name} applies more than {limit} operations to each element")


def _check_arithmetic(op: Any, block: Any, functions: dict[str, Any], limit: int) -> int:
    """Check that operations are arithmetic on single numbers, and count them; counting stops soon after ``limit``."""
    count, known = 0, {hash(argument) for argument in block.arguments}
    for inner in (inner.operation for inner in block.operations):
        count += 1
        if inner.name == "func.call":
            callee = functions[called(inner)]
            count += _check_arithmetic(op, callee.regions[0].blocks[0], functions, limit - count)
        elif inner.name.partition(".")[2] not in _APPLIED:
            raise ProgramError(f"{op.name} applies {inner.name}, expected arithmetic on single numbers")
        if not all(_is_number(result) for result in inner.results):
            raise ProgramError(f"{op.name} applies {inner.name} to an array, expected arithmetic on single numbers")
        if any(hash(operand) not in known and not _is_constant_number(operand) for operand in inner.operands):
            raise ProgramError(f"{op.name} captures an outside value; it may only use its arguments")
        known |= {hash(result) for result in inner.results}
        if count > limit:
            break
    return count


def _is_number(value: Any) -> bool:
    return re.match(r"tensor<\d+x", str(value.type)) is None


def _is_constant_number(value: Any) -> bool:
    """Return True for a constant captured from outside, which compilers move inside."""
    return getattr(value.owner, "name", "") == "stablehlo.constant" and _is_number(value)


@lru_cache(maxsize=4096)
def check_type(text: str) -> None:
    """Raise ``ProgramError`` unless the type is an array of fixed shape, known elements and a possible size."""
    match = _TENSOR.fullmatch(text)
    if not match:
        raise ProgramError(f"a value of type {text[:120]} is not allowed: expected an array of fixed shape")
    shape = [int(dim) for dim in match[1].split("x")[:-1]]
    if len(shape) > MAX_RANK:
        raise ProgramError(f"a value of type {text[:120]} has {len(shape)} dims and at most {MAX_RANK} are allowed")
    digits = re.search(r"\d+", match[2])
    bits = int(digits[0]) * (2 if "complex" in text else 1) if digits else 8
    if math.prod(shape) * max(bits, 8) // 8 > MAX_VALUE_BYTES:
        raise ProgramError(f"a value of type {text[:80]} has more than 2^60 bytes; no machine has that much memory")


def check_constant(op: Any) -> None:
    """Raise ``ProgramError`` for a constant that exceeds the byte limit; one repeated number is small."""
    kind = ir.RankedTensorType(op.results[0].type)
    size = math.prod(kind.shape) * max(1, getattr(kind.element_type, "width", 8) // 8)
    if "complex<" in str(kind.element_type):  # MLIR's Python cannot read them
        plain, repeated = "dense<" in str(op)[:200], False
    else:
        value = op.attributes["value"]
        plain = isinstance(value, ir.DenseElementsAttr)
        repeated = plain and value.is_splat
    if not plain:
        raise ProgramError("a constant has no numbers: expected the numbers themselves, not a reference to them")
    if size > MAX_CONSTANT_BYTES and not repeated:
        raise ProgramError(
            f"the program contains a constant of {size:,} bytes, and at most {MAX_CONSTANT_BYTES:,} are allowed. "
            "Compute it in the function or pass it as an argument."
        )


def function_name(op: Any) -> str:
    """The function named by an operation's location or callee, as the learner calls it; empty if there is none."""
    match = _NAMED.match(str(op.location)[:1000])  # limited, in case it is forged
    callee = called(op).lstrip("_") if op.name == "func.call" else ""
    name = (match[1] or callee or match[2]) if match else callee
    return "" if name == op.name.partition(".")[2] else name


def source_line(op: Any) -> str:
    """``cell:line`` of the innermost frame of an operation's location, empty if it has only frames of the course."""
    match = _FRAME.search(str(op.location))
    return f"{match[1]}:{match[2]}" if match and not match[1].startswith("/") else ""


def _text(attribute: Any) -> str:
    return attribute.value

"""Before a Program from elsewhere is compiled: does its artefact say what its header says, and only what it may?"""

from __future__ import annotations

from typing import Any

import jax
from jax import export as jax_export
from jax.extend.mlir import ir
from jax.interpreters.mlir import make_ir_context
from jax.sharding import Mesh, NamedSharding

from course.program.program import Leaf, Program, ProgramError
from course.program.stablehlo import operations

DIALECTS = {"builtin", "func", "stablehlo", "chlo", "sdy"}
CUSTOM_CALLS: set[str] = set()
PLATFORMS = ("cpu", "cuda")


def audit(program: Program, mesh: Mesh) -> jax_export.Exported:
    """The Program's artefact, once everything about it has been checked.

    Args:
        program: As loaded; its header's form has been checked.
        mesh: The mesh it will run on, with the Program's axes.

    Raises:
        ProgramError: With what was found and what it should have been.
    """
    if program.platform not in PLATFORMS:
        raise ProgramError(f"platform {program.platform!r} is none of {', '.join(PLATFORMS)}")
    try:
        exported = jax_export.deserialize(bytearray(program.artefact))
        text = exported.mlir_module()
    except Exception as error:
        raise ProgramError(f"the artefact cannot be read: {type(error).__name__}") from None
    _expect("number of devices", exported.nr_devices, program.num_devices)
    _expect("platforms", tuple(exported.platforms), (program.platform,))
    _expect("effects", (*exported.ordered_effects, *exported.unordered_effects), ())
    _expect("disabled safety checks", tuple(exported.disabled_safety_checks), ())
    _check_signature("input", exported.in_avals, program.inputs)
    _check_signature("output", exported.out_avals, program.outputs)
    for leaf, found in zip(program.inputs, exported.in_shardings_jax(mesh), strict=True):
        expected = NamedSharding(mesh, leaf.partition_spec)
        if found is None or not found.is_equivalent_to(expected, len(leaf.shape)):
            raise ProgramError(f"input {leaf.name} is sharded as {found} and the header says {leaf.partition_spec}")
    with make_ir_context():
        for op in operations(ir.Module.parse(text).operation):
            _check_operation(op)
    return exported


def _expect(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise ProgramError(f"the artefact's {what}: found {found!r}, expected {expected!r}")


def _check_signature(what: str, avals: Any, leaves: tuple[Leaf, ...]) -> None:
    _expect(f"number of {what}s", len(avals), len(leaves))
    for aval, leaf in zip(avals, leaves, strict=True):
        _expect(f"{what} {leaf.name}", (aval.shape, jax.numpy.dtype(aval.dtype).name), (leaf.shape, leaf.dtype))


def _check_operation(op: Any) -> None:
    dialect = op.name.partition(".")[0]
    if dialect not in DIALECTS:
        raise ProgramError(f"operation {op.name} is of dialect {dialect!r}, which is not allowed")
    if op.name == "stablehlo.custom_call":
        target = ir.StringAttr(op.attributes["call_target_name"]).value
        if target not in CUSTOM_CALLS:
            raise ProgramError(f"the program calls {target!r}, which is not allowed: it would run outside of XLA")

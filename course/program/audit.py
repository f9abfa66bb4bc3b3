"""Check that an untrusted Program's artefact agrees with its header, before anything reads or compiles it.

Every property is checked by name, and anything not known to be harmless is refused: operations, attributes and types
by allow-lists. ``rules`` does that for the module; this file for what ``jax.export`` wraps around it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
from jax import export as jax_export
from jax.extend.mlir import ir
from jax.interpreters.mlir import make_ir_context
from jax.sharding import NamedSharding

from course.mesh import abstract_mesh
from course.program.program import Leaf, Program, ProgramError, spec_of, without_size_one
from course.program.rules import check_module

PLATFORMS = ("cpu", "cuda")


@dataclass(frozen=True)
class Audited:
    """The result of an audit: the artefact as ``jax.export`` reads it, and its module as MLIR."""

    exported: jax_export.Exported
    module: Any


def audit(program: Program, *, lenient: bool = False) -> Audited:
    """Check a Program's artefact and return it with its module.

    Args:
        program: The Program.
        lenient: Whether its module may contain any operations. Predictions use this for ungraded programs; operations
            that the readers do not know are still refused by name.

    Raises:
        ProgramError: The message says what was found and what it should have been.
    """
    return _audited(program, lenient)


@lru_cache(maxsize=8)  # the analyses and the compiler read a Program one after the other, and a check has several
def _audited(program: Program, lenient: bool) -> Audited:
    program.check_form()
    if program.platform not in PLATFORMS:
        raise ProgramError(f"platform {program.platform!r} is none of {', '.join(PLATFORMS)}")
    try:
        exported = jax_export.deserialize(bytearray(program.artefact))
        text = exported.mlir_module()
        with make_ir_context():
            module = ir.Module.parse(text)
    except Exception as error:  # damaged input can make any part of the reader raise
        raise ProgramError(
            "this Program's artefact cannot be read: it is damaged, or a jax that is too new wrote it "
            f"({type(error).__name__}); export it again"
        ) from None
    with module.context, readable():
        _check_wrapping(exported, program)
        _check_signature("input", exported.in_avals, program.inputs)
        _check_signature("output", exported.out_avals, program.outputs)
        _check_shardings("input", exported.in_shardings_jax, program.inputs, program.mesh, may_miss=lenient)
        _check_shardings("output", exported.out_shardings_jax, program.outputs, program.mesh, may_miss=True)
        if not lenient:
            check_module(module.operation, program)
    return Audited(exported, module)


@contextmanager
def readable() -> Iterator[None]:
    """Attribute any error raised while reading a module to the module: nothing has been computed yet."""
    try:
        yield
    except ProgramError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"[:300]
        raise ProgramError(f"this Program's artefact has an unreadable format ({problem})") from None


def _check_wrapping(exported: jax_export.Exported, program: Program) -> None:
    """Check everything in a ``jax.export`` artefact but its signature and its module."""
    flat = [0] * len(program.inputs)
    oldest = jax_export.minimum_supported_calling_convention_version
    newest = jax_export.maximum_supported_calling_convention_version
    _expect("name", exported.fun_name, "program")
    _expect("number of devices", exported.nr_devices, program.num_devices)
    _expect("platforms", tuple(exported.platforms), (program.platform,))
    _expect("effects", (*exported.ordered_effects, *exported.unordered_effects), ())
    _expect("disabled safety checks", tuple(exported.disabled_safety_checks), ())
    _expect("number of inputs", len(exported.in_avals), len(program.inputs))
    _expect("number of outputs", len(exported.out_avals), len(program.outputs))
    _expect("form of inputs", exported.in_tree, jax.tree.structure((tuple(flat), {})))
    _expect("form of outputs", exported.out_tree, jax.tree.structure(tuple([0] * len(program.outputs))))
    _expect("used inputs", tuple(exported.module_kept_var_idx), tuple(range(len(program.inputs))))
    _expect("use of symbolic shapes", bool(exported.uses_global_constants), False)
    _expect("derivative", "one" if exported.has_vjp() else "none", "none")
    if not oldest <= exported.calling_convention_version <= newest:
        version = exported.calling_convention_version
        raise ProgramError(f"the artefact's calling convention: found {version}, expected {oldest} to {newest}")


def _expect(name: str, actual: Any, expected: Any) -> None:
    if actual != expected:
        raise ProgramError(f"the artefact's {name}: found {str(actual)[:200]!r}, expected {str(expected)[:200]!r}")


def _check_signature(side: str, avals: Any, leaves: tuple[Leaf, ...]) -> None:
    for aval, leaf in zip(avals, leaves, strict=True):
        dtype = jax.numpy.dtype(aval.dtype).name
        actual, declared = (f"{kind}{list(shape)}" for kind, shape in ((dtype, aval.shape), (leaf.dtype, leaf.shape)))
        if actual != declared:
            raise ProgramError(f"{side} {leaf.name}: the artefact has a {actual} and the signature one of {declared}")
        memory = getattr(aval, "memory_space", None)
        if memory is not None and memory.name != "Device":
            raise ProgramError(f"{side} {leaf.name} is in memory {memory.name!r}, expected device memory")


def _check_shardings(
    side: str, shardings_on: Any, leaves: tuple[Leaf, ...], mesh: dict[str, int], *, may_miss: bool
) -> None:
    try:
        shardings = shardings_on(abstract_mesh(mesh))
    except Exception as error:  # axes that the mesh does not have, in a library-specific form
        raise ProgramError(
            f"the artefact is for meshes that are not the Program's {mesh}: {str(error)[:200]}"
        ) from None
    _expect(f"number of {side} shardings", len(shardings), len(leaves))
    for leaf, sharding in zip(leaves, shardings, strict=True):
        if sharding is None and may_miss:
            continue  # then the module declares it
        expected = without_size_one(leaf.spec, mesh)
        if not isinstance(sharding, NamedSharding) or sharding.memory_kind not in (None, "device"):
            raise ProgramError(f"{side} {leaf.name} is sharded as {sharding} and the header has {leaf.partition_spec}")
        plain = not (getattr(sharding.spec, "unreduced", None) or getattr(sharding.spec, "reduced", None))
        fits = plain and len(sharding.spec) <= len(leaf.shape)
        if not fits or without_size_one(spec_of(sharding.spec, len(leaf.shape)), mesh) != expected:
            raise ProgramError(
                f"{side} {leaf.name} is sharded as {sharding.spec} and the header has {leaf.partition_spec}"
            )

"""Compile a Program and run it, on emulated devices or real ones."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax import export as jax_export
from jax.sharding import Mesh, NamedSharding

from course.program.audit import audit
from course.program.ir import Module
from course.program.program import Leaf, Program, ProgramError
from course.program.witness import Witness, instrument

# On CPU devices: a check runs a Program a few times, on small arrays, and optimising it takes longer than it saves.
FEW_OPTIMISATIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclass(frozen=True)
class Executable:
    """A Program that is ready to run on ``mesh``, or its twin if there is a ``witness``."""

    program: Program
    mesh: Mesh
    call: jax.stages.Compiled
    witness: Witness | None = None

    def __call__(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Full results by name, from full inputs by name.

        Raises:
            ProgramError: An input's shape or dtype differs from the signature, a result is not sharded as in the
                header, devices' copies of it differ, or the witness contradicts the analyses.
        """
        arrays = [self._place(leaf, inputs) for leaf in self.program.inputs]
        results = self.call(*arrays)
        if self.witness:
            *results, seen = results
            self.witness.check(np.asarray(seen))
        return {
            leaf.name: self._collect(leaf, result) for leaf, result in zip(self.program.outputs, results, strict=True)
        }

    def _place(self, leaf: Leaf, inputs: dict[str, np.ndarray]) -> jax.Array:
        if leaf.name not in inputs:
            raise ProgramError(f"input {leaf.name} is missing")
        array = np.asarray(inputs[leaf.name])
        if (array.shape, array.dtype) != (leaf.shape, jax.numpy.dtype(leaf.dtype)):
            actual = f"{array.dtype}{list(array.shape)}"
            raise ProgramError(f"input {leaf.name} is {actual} and must be {leaf.dtype}{list(leaf.shape)}")
        return jax.device_put(array, NamedSharding(self.mesh, leaf.partition_spec))

    def _collect(self, leaf: Leaf, result: jax.Array) -> np.ndarray:
        expected = NamedSharding(self.mesh, leaf.partition_spec)
        if not result.sharding.is_equivalent_to(expected, result.ndim):
            raise ProgramError(f"result {leaf.name} is sharded as {result.sharding} and the header has {expected.spec}")
        first: dict[str, bytes] = {}
        for shard in result.addressable_shards:
            data = np.asarray(shard.data).tobytes()
            if first.setdefault(str(shard.index), data) != data:
                raise ProgramError(f"result {leaf.name} should be the same on devices that share it, and differs")
        return np.asarray(result)


def work_of(program: Program) -> str:
    """A hash of everything that a Program does, excluding its source lines.

    Raises:
        ProgramError: The audit fails.
    """
    text = audit(program).module.operation.get_asm(enable_debug_info=False)
    return hashlib.sha256(replace(program, artefact=text.encode()).serialise()).hexdigest()


def lowered(
    program: Program, exported: jax_export.Exported, mesh: Mesh, free: Sequence[int] = ()
) -> jax.stages.Lowered:
    """Lower ``exported`` for the Program's inputs on a mesh; donated inputs stay donated.

    The compiler chooses the shardings of the inputs whose indices are in ``free``.
    """
    structs = [
        jax.ShapeDtypeStruct(
            leaf.shape,
            jax.numpy.dtype(leaf.dtype),
            sharding=None if i in free else NamedSharding(mesh, leaf.partition_spec),
        )
        for i, leaf in enumerate(program.inputs)
    ]
    return jax.jit(exported.call, donate_argnums=program.donated, keep_unused=True).lower(*structs)


def compile_program(program: Program, mesh: Mesh, module: Module | None = None) -> Executable:
    """Audit the Program and compile it for ``mesh``; donated inputs stay donated.

    Args:
        program: The Program.
        mesh: The mesh it will run on.
        module: The module that the analyses read, if each run is to be compared with their assumptions.

    Raises:
        ProgramError: The audit fails.
    """
    if dict(mesh.shape) != program.mesh:
        raise ProgramError(f"the Program is for mesh {program.mesh} and was given {dict(mesh.shape)}")
    exported = audit(program).exported
    witness = instrument(program, module) if module else None
    if witness:
        exported = witness.exported
    try:
        options = FEW_OPTIMISATIONS if mesh.devices.flat[0].platform == "cpu" else None
        return Executable(program, mesh, lowered(program, exported, mesh).compile(options), witness)
    except Exception as error:  # a damaged artefact can make any part of the compiler raise
        raise ProgramError(f"the program cannot be compiled: {type(error).__name__}: {str(error)[:300]}") from None

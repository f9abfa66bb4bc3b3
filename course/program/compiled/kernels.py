"""The cost of one kernel of the GPU compiler's schedule, by the rooflines that the timeline uses.

The complete rules:

- A matmul (a dot, a library call, a fusion with one inside) is charged its FLOPs or its memory traffic,
  whichever takes longer: ``Machine.matmul_seconds``. Every other kernel: ``Machine.kernel_seconds``.
- A kernel's traffic is the bytes of its operands that it reads and of its results that it writes. A slice inside a
  fusion reads only the slice, not the whole array; an update of a slice writes the update, in place.
- Tuples, bitcasts, constants and the like are free.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from course.machine import Machine
from course.program.compiled.schedule import GEMMS, Array, Computation, Instruction, Schedule

_FREE = set(
    "parameter constant tuple get-tuple-element bitcast partition-id replica-id after-all opt-barrier domain "
    "add-dependency get-dimension-size".split()
)
CONVOLUTIONS = "__cudnn$conv"
_SLICES = {"slice", "dynamic-slice", "gather"}
# Element i of the result is computed from element i of each operand of the same size.
_MOVES = _FREE | set(
    "copy transpose reshape broadcast concatenate pad reverse iota slice dynamic-slice dynamic-update-slice "
    "gather scatter fusion call while conditional dot custom-call".split()
)


@dataclass(frozen=True)
class Work:
    """The work of a kernel.

    Attributes:
        flops: FLOPs of matmuls.
        dtype: Dtype of their operands, in StableHLO's names.
        bytes: Bytes read and written.
        operations: Elements computed by its other operations.
    """

    flops: float
    dtype: str
    bytes: float
    operations: float

    def seconds(self, machine: Machine) -> float:
        if self.flops:
            return machine.matmul_seconds(self.flops, self.bytes, self.dtype)
        return machine.kernel_seconds(self.bytes, self.operations) if self.bytes else 0.0


NOTHING = Work(0.0, "", 0.0, 0.0)


def work_of(schedule: Schedule, computation: Computation, instruction: Instruction) -> Work:
    """The work of one scheduled instruction that is neither a collective nor control flow."""
    if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
        return NOTHING
    operands = [computation.by_name[name] for name in instruction.operands]
    operand_bytes = [sum(array.bytes for array in operand.results) for operand in operands]
    if instruction.opcode == "fusion" or instruction.opcode == "async-start":
        inner = schedule.computations[instruction.calls[0]]
        flops, dtype, operations = _arithmetic(schedule, inner)
        return Work(flops, dtype, _read(schedule, inner, operand_bytes) + _written(inner), operations)
    if instruction.opcode == "dot" or instruction.target in GEMMS:
        flops = matmul_flops(instruction, operands[0].results[0])
        results = [array for array in instruction.results if array.dtype != "s8"]  # a library's workspace is in s8
        size = sum(operand_bytes) + sum(array.bytes for array in results or instruction.results)
        return Work(flops, operands[0].results[0].dtype, float(size), 0.0)
    if instruction.target.startswith(CONVOLUTIONS):
        flops = convolution_flops(instruction, [operand.results[0] for operand in operands])
        return Work(flops, operands[0].results[0].dtype, float(sum(operand_bytes) + instruction.results[0].bytes), 0.0)
    written_bytes = float(sum(array.bytes for array in instruction.results))
    if instruction.opcode in _SLICES:
        return Work(0.0, "", 2 * written_bytes, 0.0)
    if instruction.opcode == "dynamic-update-slice":
        return Work(0.0, "", 2.0 * operand_bytes[1], 0.0)
    return Work(0.0, "", sum(operand_bytes) + written_bytes, _operations(instruction, operands))


def matmul_flops(instruction: Instruction, left: Array) -> float:
    """``2 x (elements of the result) x (contracted elements)``; ``left`` is the first operand."""
    contracted = math.prod(left.shape[dim] for dim in instruction.dims("lhs_contracting"))
    return 2.0 * instruction.results[0].elements * contracted


def convolution_flops(instruction: Instruction, operands: list[Array]) -> float:
    """FLOPs of a library's convolution or its gradient: ``2 x (its output's elements) x (the kernel's for each)``."""
    result, labels = instruction.results[0], re.search(r"dim_labels=\w+_(\w+)->", instruction.text)
    if instruction.target.endswith("BackwardFilter"):
        output, kernel = operands[1], result
    else:
        output, kernel = (operands[0] if instruction.target.endswith("BackwardInput") else result), operands[1]
    features = kernel.shape[labels[1].index("o")] if labels else 1
    return 2.0 * output.elements * kernel.elements / max(1, features)


def _arithmetic(schedule: Schedule, computation: Computation) -> tuple[float, str, float]:
    """FLOPs and dtype of the products in a fusion, and the number of elements computed by its other operations."""
    flops, dtype, operations = 0.0, "", 0.0
    for instruction in computation.instructions:
        operands = [computation.by_name[name] for name in instruction.operands]
        if instruction.opcode == "dot" or instruction.target in GEMMS:
            left = operands[0].results[0]
            flops, dtype = flops + matmul_flops(instruction, left), left.dtype
        elif instruction.opcode in ("fusion", "call"):
            inner = _arithmetic(schedule, schedule.computations[instruction.calls[0]])
            flops, dtype, operations = flops + inner[0], dtype or inner[1], operations + inner[2]
        else:
            operations += _operations(instruction, operands)
    return flops, dtype, operations


def _operations(instruction: Instruction, operands: list[Instruction]) -> float:
    if instruction.opcode in _MOVES or not instruction.results:
        return 0.0
    sized = operands[0] if instruction.opcode in ("reduce", "reduce-window", "sort") else instruction
    return float(sized.results[0].elements)


def _read(schedule: Schedule, computation: Computation, operand_bytes: list[int]) -> float:
    """Bytes that a fusion reads, from the bytes of its operands."""
    shares = _shares(schedule, computation)
    total = 0.0
    for instruction in computation.instructions:
        if instruction.opcode == "parameter":
            total += operand_bytes[instruction.number] * shares.get(instruction.name, 0.0)
    return total


def _shares(schedule: Schedule, computation: Computation) -> dict[str, float]:
    """The fraction of each value in a fusion that is needed, propagated backwards from the result."""
    whole = {computation.root.name: 1.0}  # needed by operations that use all of it or work element by element
    parts: dict[str, float] = {}  # needed by slices, whose fractions add up
    for instruction in reversed(computation.instructions):
        share = min(1.0, whole.get(instruction.name, 0.0) + parts.get(instruction.name, 0.0))
        whole[instruction.name] = share
        nested = _nested_shares(schedule, instruction) if instruction.opcode == "fusion" else {}
        for place, name in enumerate(instruction.operands):
            operand = computation.by_name[name]
            if instruction.opcode in _SLICES and place == 0:
                elements = max(1, operand.results[0].elements)
                parts[name] = parts.get(name, 0.0) + share * instruction.results[0].elements / elements
            elif instruction.opcode == "dynamic-update-slice" and place == 0 and _in_place(computation, instruction):
                continue
            else:
                whole[name] = max(whole.get(name, 0.0), share * nested.get(place, 1.0))
    return whole


def _nested_shares(schedule: Schedule, instruction: Instruction) -> dict[int, float]:
    inner = schedule.computations[instruction.calls[0]]
    shares = _shares(schedule, inner)
    return {i.number: shares.get(i.name, 0.0) for i in inner.instructions if i.opcode == "parameter"}


def _in_place(computation: Computation, update: Instruction) -> bool:
    """Check that an update of a slice is the fusion's result, which then reuses the operand's buffer."""
    return update.name in {producer.name for producer in _producers(computation, computation.root)}


def _producers(computation: Computation, instruction: Instruction) -> list[Instruction]:
    """The instructions that compute the result of ``instruction``, through tuples and bitcasts."""
    if instruction.opcode == "tuple":
        return [i for name in instruction.operands for i in _producers(computation, computation.by_name[name])]
    if instruction.opcode in ("bitcast", "reshape"):
        return _producers(computation, computation.by_name[instruction.operands[0]])
    return [instruction]


def _written(computation: Computation) -> float:
    """Bytes that a fusion writes."""
    total = 0.0
    for producer in _producers(computation, computation.root):
        updated = producer.opcode == "dynamic-update-slice"
        results = computation.by_name[producer.operands[1]].results if updated else producer.results
        total += sum(array.bytes for array in results)
    return total

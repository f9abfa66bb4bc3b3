"""The witness: an executed Program's real decisions, compared with the assumptions of the analyses.

Costs, memory and timeline rely on ``evaluate``. Here the Program gets a twin that computes the same and returns, for
each device, one number per loop or branch: a hash of all its decisions, in order. Executed blocks nest, so the orders
of the single loops and branches determine the order of everything: devices with equal hashes ran the same operations
in the same order. Counts alone are not enough, since a timeline depends on which trip takes which branch. The hash is
a polynomial at a secret point, so that nobody can search for two programs with the same hash.

A loop that counts from one constant to another by ones is not watched: its trips are known without an evaluator, and
compilers cannot change them. Ops that no result depends on, which compilers remove, are not watched or counted either.
"""

from __future__ import annotations

import io
import math
import re
import secrets
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import export as jax_export
from jax.core import ShapedArray
from jax.extend import mlir
from jax.extend.mlir import ir

from course.program.audit import audit
from course.program.evaluate import counted_trips, follow, taken
from course.program.export import stablehlo_version
from course.program.ir import Module, Op, makers_of, unsupported, walk
from course.program.program import Program, ProgramError
from course.program.rules import operations

PRIME = 2**31 - 1
_CONTROL = ("stablehlo.while", "stablehlo.case")


@dataclass(frozen=True)
class Witness:
    """A Program's twin and its expected results.

    Attributes:
        exported: The twin, with one more result: ``[devices, loops and branches]``.
        module: The module that the analyses read.
        watched: The loops and branches, in program order; one column of the result each.
        point: The point at which the hash is evaluated.
    """

    exported: jax_export.Exported
    module: Module
    watched: tuple[Op, ...]
    point: int

    def check(self, seen: np.ndarray) -> None:
        """Compare the devices' decisions with those that the analyses assumed.

        Raises:
            ProgramError: They differ; the message names the line of the first loop or branch that does.
        """
        assumed: dict[tuple[int, ...], list[int]] = {}
        for device, hashes in enumerate(seen):
            decisions, on_data = follow(self.module, device)
            if decisions not in assumed:
                assumed[decisions] = self._assumed(decisions)
            free = {inner for op in on_data for inner in (op, *(i for r in op.regions for i in walk(r)))}
            for op, ours, theirs in zip(self.watched, assumed[decisions], hashes, strict=True):
                if ours != theirs and op not in free:
                    raise _otherwise(op, f"on device {device}")

    def _assumed(self, decisions: tuple[int, ...]) -> list[int]:
        """The hashes of the decisions that the analyses assume for a device."""
        hashes = dict.fromkeys(self.watched, 0)
        for op, choice in taken(self.module.main, iter(decisions)):
            if op in hashes:
                hashes[op] = (hashes[op] * self.point + choice + 1) % PRIME
        return list(hashes.values())


def _check_counted(module: Module, counted: dict[Op, int]) -> None:
    """Raise ``ProgramError`` unless each unwatched loop is assumed to make the trips that it must make."""
    devices = range(math.prod(module.mesh.values()))
    for decisions in {follow(module, device).decisions for device in devices}:
        trips = dict.fromkeys(counted, 0)
        for op, choice in taken(module.main, iter(decisions)):
            if op in trips and not choice and trips[op] != counted[op]:
                raise _otherwise(op, "on every device")
            if op in trips:
                trips[op] = (trips[op] + 1) * choice


def _otherwise(op: Op, where: str) -> ProgramError:
    difference = "the loop runs a different number of times" if op.kind == "while" else "another branch runs"
    message = (
        f"{difference} {where} than the cost analysis assumed; "
        "compute conditions with plain arithmetic on small numbers"
    )
    return unsupported(op, op.line, message)


def instrument(program: Program, module: Module) -> Witness | None:
    """The Program's witness; None if there is no loop or branch to watch.

    Args:
        program: The Program; audited here.
        module: The same, parsed.

    Raises:
        ProgramError: The audit fails, or a loop's condition contains loops or branches.
    """
    makers = makers_of(module.main)
    control = [op for op in walk(module.main) if op.kind in ("while", "case")]
    counted = {op: trips for op in control if (trips := counted_trips(op, makers)) is not None}
    _check_counted(module, counted)
    watched = tuple(op for op in control if op not in counted)
    if not watched:
        return None
    for inner in (inner for op in watched if op.kind == "while" for inner in walk(op.regions[0])):
        if inner.kind in ("while", "case"):
            raise unsupported(inner, inner.line, "a loop's condition may not loop or branch; do that in its body")
    audited = audit(program)
    point = secrets.randbelow(PRIME - 2**16) + 2**16
    with audited.module.context, ir.Location.unknown():
        twin = audited.module.operation.clone(ip=False)
        _Twin(
            twin, program.num_devices, {op.attributes["number"]: slot for slot, op in enumerate(watched)}, point
        ).write()
        version = stablehlo_version(audited.exported)
        stream = io.BytesIO()
        twin.write_bytecode(stream)
        data = mlir.serialize_portable_artifact(stream.getvalue(), version, use_mixed_serialization=True)
    aval = ShapedArray((program.num_devices, len(watched)), np.dtype(np.uint32))
    last = {"out_avals": aval, "_out_named_shardings": None, "out_shardings_hlo": None}
    fields: Any = {name: (*getattr(audited.exported, name), value) for name, value in last.items()}
    tree = jax.tree.structure(tuple([0] * len(fields["out_avals"])))
    exported = replace(audited.exported, mlir_module_serialized=data, out_tree=tree, **fields)
    return Witness(exported, module, watched, point)


class _Twin:
    """Rewrites a module: the hashes pass through every loop and branch to an additional last result."""

    def __init__(self, module: Any, devices: int, slots: dict[int, int], point: int):
        self.devices, self.slots, self.point, self.count = devices, slots, point, 0
        functions = [op.operation for op in module.regions[0].blocks[0].operations if op.operation.name == "func.func"]
        self.functions = {op.attributes["sym_name"].value: op for op in functions}
        self.kind = self._array(1, ir.IntegerType.get_signless(64))

    def write(self) -> None:
        main = self.functions["main"]
        block = main.regions[0].blocks[0]
        self._inline(block)
        outer = next((op.operation for op in block.operations if op.operation.name == "sdy.manual_computation"), None)
        inside = outer.regions[0].blocks[0] if outer else block  # jax leaves the shard_map of one device out
        start = ir.InsertionPoint.at_block_begin(inside)
        state = self._through(inside, self._constant([0] * len(self.slots), start))
        number = self._array(1, ir.IntegerType.get_unsigned(32))
        seen = _create("stablehlo.convert", [number], [state], ir.InsertionPoint.at_block_terminator(inside))
        _return(inside, seen)
        if outer:
            axes = ", ".join(re.findall(r'"[^"]+"', str(outer.attributes["manual_axes"])))
            shardings = str(outer.attributes["out_shardings"]).removesuffix("]>")
            mesh = str(outer.attributes["out_shardings"]).partition("<@")[2].partition(",")[0]
            out_shardings = ir.Attribute.parse(f"{shardings}, <@{mesh}, [{{{axes}}}, {{}}]>]>")
            number = self._array(self.devices, ir.IntegerType.get_unsigned(32))
            seen = _widened(outer, list(outer.operands), number, {"out_shardings": out_shardings})
            _return(block, seen)
        kind: Any = ir.TypeAttr(main.attributes["function_type"]).value
        main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(kind.inputs, [*kind.results, number]))
        if "res_attrs" in main.attributes:
            main.attributes["res_attrs"] = ir.ArrayAttr.get([*main.attributes["res_attrs"], ir.DictAttr.get({})])

    def _inline(self, block: Any) -> None:
        """Inline each function that contains a loop or a branch."""
        for op in [op.operation for op in block.operations]:
            for region in op.regions:
                self._inline(region.blocks[0])
            if op.name != "func.call" or not self._decides(op.attributes["callee"].value):
                continue
            body = self.functions[op.attributes["callee"].value].clone(ip=False).regions[0].blocks[0]
            self._inline(body)
            for argument, value in zip(body.arguments, op.operands, strict=True):
                argument.replace_all_uses_with(value)
            *ops, final = [inner.operation for inner in body.operations]
            for inner in ops:
                inner.move_before(op)
            for result, value in zip(op.results, final.operands, strict=True):
                result.replace_all_uses_with(value)
            op.erase()

    def _decides(self, name: str) -> bool:
        ops = operations(self.functions[name])
        return any(
            op.name in _CONTROL or (op.name == "func.call" and self._decides(op.attributes["callee"].value))
            for op in ops
        )

    def _through(self, block: Any, state: Any) -> Any:
        """The hashes after a block, which starts with the hashes ``state``."""
        for op in [op.operation for op in block.operations if op.operation.name in _CONTROL]:
            first, self.count = self.count, self.count + 1
            slot, inner = self.slots.get(first), _controls(op.regions)
            if self.slots.keys().isdisjoint(range(first, self.count + inner)):
                self.count += inner
            elif op.name == "stablehlo.case":
                for choice, region in enumerate(op.regions):
                    inside = region.blocks[0]
                    start = ir.InsertionPoint.at_block_begin(inside)
                    _return(inside, self._through(inside, self._noted(state, slot, choice, start)))
                state = _widened(op, list(op.operands), self.kind)
            else:
                condition, body = (region.blocks[0] for region in op.regions)
                self.count += _controls(op.regions[:1])
                for inside in (condition, body):
                    inside.add_argument(self.kind, ir.Location.unknown())
                start = ir.InsertionPoint.at_block_begin(body)
                _return(body, self._through(body, self._noted(body.arguments[-1], slot, 1, start)))
                state = _widened(op, [*op.operands, state], self.kind)
                state = self._noted(state, slot, 0, ir.InsertionPoint.after(state.owner))
        return state

    def _noted(self, state: Any, slot: int | None, choice: int, insertion: Any) -> Any:
        """The hashes after one more decision: ``(hash * point + choice + 1) % PRIME`` in its column, if it has one."""
        if slot is None:
            return state
        columns = range(len(self.slots))
        for kind, numbers in (
            ("multiply", [self.point if column == slot else 1 for column in columns]),
            ("add", [choice + 1 if column == slot else 0 for column in columns]),
            ("remainder", [PRIME] * len(columns)),
        ):
            state = _create(f"stablehlo.{kind}", [self.kind], [state, self._constant(numbers, insertion)], insertion)
        return state

    def _constant(self, numbers: list[int], insertion: Any) -> Any:
        array: Any = np.array([numbers], np.int64)
        value = ir.DenseElementsAttr.get(array)
        return _create("stablehlo.constant", [self.kind], [], insertion, {"value": value})

    def _array(self, rows: int, element: Any) -> Any:
        return ir.RankedTensorType.get([rows, len(self.slots)], element)


def _controls(regions: Any) -> int:
    ops = (op.operation for region in regions for op in region.blocks[0].operations)
    return sum((op.name in _CONTROL) + _controls(op.regions) for op in ops)


def _create(
    name: str, results: list[Any], operands: list[Any], insertion: Any, attributes: dict[str, Any] | None = None
) -> Any:
    """The last result of a new operation."""
    return ir.Operation.create(name, results, operands, attributes, ip=insertion).results[-1]


def _widened(op: Any, operands: list[Any], result: Any, attributes: dict[str, Any] | None = None) -> Any:
    """Replace an operation by one with an additional result, which is returned; its regions move."""
    old_attributes = {name: attribute for name, attribute in op.attributes.items()}
    types = [*(value.type for value in op.results), result]
    new = ir.Operation.create(
        op.name,
        types,
        operands,
        old_attributes | (attributes or {}),
        regions=len(op.regions),
        loc=op.location,
        ip=ir.InsertionPoint(op),
    )
    for old, region in zip(op.regions, new.regions, strict=True):
        old.blocks[0].append_to(region)
    for value, same in zip(op.results, new.results, strict=False):
        value.replace_all_uses_with(same)
    op.erase()
    return new.results[-1]


def _return(block: Any, value: Any) -> None:
    """Make a block return one more value."""
    final = block.operations[len(block.operations) - 1].operation
    ir.Operation.create(final.name, [], [*final.operands, value], ip=ir.InsertionPoint(final))
    final.erase()

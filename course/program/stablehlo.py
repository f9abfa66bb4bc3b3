"""Read StableHLO: calls inlined, dead code removed, every op with its source line, all of it inside ``shard_map``.

An op that no analysis can price is refused here, by name and line, and so is a value that crosses the boundary of
``shard_map`` in a form that differs from the signature.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jax.extend.mlir import ir
from jax.interpreters.mlir import make_ir_context

from course.program.audit import audit, readable
from course.program.collectives import check_axes
from course.program.foreign import MATMULS, as_product, scatter_reductions
from course.program.ir import (
    COLLECTIVES,
    Block,
    Module,
    Op,
    Value,
    remove_dead_code,
    unsupported,
    walk,
)
from course.program.operation import attributes_of, check_groups, kind_of, value_of
from course.program.partition import partitioned
from course.program.program import Leaf, Program, ProgramError, Spec, without_size_one
from course.program.rules import MAX_DEPTH, MAX_OPS, called, function_name, source_line
from course.program.simplify import add_in_place, unroll_rounds, without_single_trips

_RETURNS = {"stablehlo.return", "sdy.return", "func.return"}
_ANNOTATIONS = {"sdy.sharding_constraint", "sdy.reshard", "sdy.propagation_barrier"}
_AXES = r'(?:"[\w.\-]+"(?:, "[\w.\-]+")*)?'
_SHARDING = re.compile(rf"<@[\w.]+, \[((?:\{{{_AXES}\}}(?:, \{{{_AXES}\}})*)?)\]>")


def parse(program: Program, *, data_branches: bool = False, lenient: bool = False) -> Module:
    """The Program's operations, with dead code removed.

    Args:
        program: The Program.
        data_branches: Whether a branch may depend on data. The analyses then take the branch that computes more, and no
            branch may contain a collective. Otherwise they refuse the Program.
        lenient: Whether the Program is predicted and not graded. Then XLA partitions anything but one ``shard_map``, a
            collective may run over parts of axes, and library operations are priced.

    Raises:
        ProgramError: An op that the analyses do not know, or work that is not inside ``shard_map``.
    """
    module = audit(program, lenient=lenient).module
    alike = False
    if lenient and not is_one_shard_map(program):
        with make_ir_context():
            module = ir.Module.parse(partitioned(program).module)
        with module.context, readable():
            main = _Reader(module, program, lenient=True).partitioned()
        scatter_reductions(main, program.num_devices)
        alike = True
    else:
        with module.context, readable():
            main = _Reader(module, program, lenient=lenient).read()
    if not lenient:
        for op in walk(main):
            if op.kind in COLLECTIVES:
                check_axes(op, program.mesh)
    unroll_rounds(main)
    add_in_place(main)
    remove_dead_code(main)
    mesh, shorter = dict(program.mesh), without_single_trips(main)
    shorter_module = Module(shorter, mesh, data_branches, alike) if shorter else None
    return Module(main, mesh, data_branches, alike, shorter_module)


def is_one_shard_map(program: Program) -> bool:
    """Return True if a Program needs no partitioning: it is one ``shard_map`` over all devices, or runs on one."""
    module = audit(program, lenient=True).module
    with module.context, readable():
        try:
            _Reader(module, program, lenient=True).one_shard_map()
        except ProgramError:
            return False
    return True


@dataclass(slots=True)
class _Text:
    """An operation as MLIR describes it; operands and results are given by hash.

    ``inlined`` is the block that replaces a call or, if it ``captures`` values, a ``shard_map`` on one device.
    """

    op: Any
    kind: str
    operands: list[int]
    results: dict[int, Value] = field(default_factory=dict)
    line: str = ""
    function: str = ""
    attributes: dict[str, Any] = field(default_factory=dict)
    regions: list[Any] = field(default_factory=list)
    inlined: Any = None
    captures: bool = False


class _Reader:
    """Copies MLIR into our own classes, inlining ``func.call``."""

    def __init__(self, module: Any, program: Program, *, lenient: bool = False):
        self.program, self.mesh, self.lenient = program, program.mesh, lenient
        tops = [op.operation for op in module.body.operations]
        self.functions = {op.attributes["sym_name"].value: op for op in tops if op.name == "func.func"}
        self.meshes = {op.attributes["sym_name"].value: op for op in tops if op.name == "sdy.mesh"}
        self.outer = self.functions["main"].regions[0].blocks[0]
        self.texts: dict[int, list[_Text]] = {}  # by the hash of a block
        self.types: dict[Any, Value] = {}
        self.count = 0
        self.controls = 0
        self.line = self.function = ""  # of the call being inlined: for a library's ops, which have no location

    def partitioned(self) -> Block:
        """The body of a module that is already for one device."""
        return self._block(self.outer, {}, 0)

    def read(self) -> Block:
        """The body of the one ``shard_map`` that ``main`` consists of."""
        body = self.one_shard_map()
        if body is None:
            return self._block(self.outer, {}, 0)
        block = self._block(body.regions[0].blocks[0], {}, 0)
        constants = self._constants()
        operand_constants = [constants.get(hash(operand)) for operand in body.operands]
        for value, constant in zip(list(block.arguments), operand_constants, strict=True):
            if constant is not None:
                block.arguments.remove(value)
                same = value.shape == value_of(constant.results[0].type).shape
                attributes = attributes_of(constant, self.meshes) if same else {}
                block.ops.insert(0, Op("constant", [], [value], attributes, [], ""))
        return block

    def one_shard_map(self) -> Any:
        """The ``shard_map`` that ``main`` consists of; None if one device does everything.

        Raises:
            ProgramError: An op is outside it, or a value crosses its boundary in a form other than the signature's.
        """
        bodies = [op for op in self.outer.operations if op.operation.name == "sdy.manual_computation"]
        if math.prod(self.mesh.values()) == 1 and (self.lenient or not bodies):  # jax leaves the shard_map out
            return None
        for op in self.outer.operations:
            if op.operation.name not in ("sdy.manual_computation", "func.return") and not _is_constant(op):
                raise unsupported(
                    None,
                    source_line(op),
                    f"{op.operation.name} is outside shard_map, where the analyses cannot tell which device "
                    "computes it; move it inside",
                )
        if len(bodies) != 1:
            raise ProgramError(f"a Program is one shard_map and this one has {len(bodies)}; merge them")
        body = bodies[0].operation
        manual = set(re.findall(r'"([^"]+)"', str(body.attributes["manual_axes"])))
        if not {axis for axis, size in self.mesh.items() if size > 1} <= manual:
            raise unsupported(
                None, source_line(body), f"shard_map is manual over {sorted(manual)} only; leave axis_names out"
            )
        self._check_boundary(body)
        return body

    def _constants(self) -> dict[int, Any]:
        """Constants that jax moves out of shard_map; nothing else may be there."""
        return {hash(op.operation.results[0]): op.operation for op in self.outer.operations if _is_constant(op)}

    def _check_boundary(self, body: Any) -> None:
        """Check that shard_map's operands and results are the signature's blocks: else data moves unseen."""
        final = next(op for op in self.outer.operations if op.operation.name == "func.return")
        inner = body.regions[0].blocks[0]
        returned = next(op for op in inner.operations if op.operation.name == "sdy.return")
        for name, count, expected in (
            ("inputs", len(self.outer.arguments), len(self.program.inputs)),
            ("outputs", len(final.operands), len(self.program.outputs)),
        ):
            if count != expected:
                raise ProgramError(f"the artefact's number of {name}: found {count}, expected {expected}")
        leaves = {
            hash(argument): leaf for argument, leaf in zip(self.outer.arguments, self.program.inputs, strict=True)
        }
        constants = self._constants()
        in_specs = _specs(body.attributes["in_shardings"], len(body.operands))
        for operand, value, spec in zip(body.operands, inner.arguments, in_specs, strict=True):
            if hash(operand) not in constants:
                self._check_block(leaves[hash(operand)], value_of(value.type), spec)
        out_specs = _specs(body.attributes["out_shardings"], len(body.results))
        results = zip(body.results, returned.operands, out_specs, strict=True)
        result_blocks = {hash(result): (value_of(value.type), spec) for result, value, spec in results}
        for operand, leaf in zip(final.operands, self.program.outputs, strict=True):
            if hash(operand) not in result_blocks:
                raise ProgramError(f"result {leaf.name} does not come out of shard_map")
            self._check_block(leaf, *result_blocks[hash(operand)])
        self._check_annotations("arg_attrs", self.program.inputs)
        self._check_annotations("res_attrs", self.program.outputs)

    def _check_block(self, leaf: Leaf, value: Value, spec: Spec) -> None:
        shape = leaf.local_shape(self.mesh)
        if value.shape != shape:
            raise ProgramError(
                f"{leaf.name}: shard_map has a block of {list(value.shape)} and the signature one of {list(shape)}"
            )
        self._check_spec(leaf, spec, "shard_map splits it as")

    def _check_annotations(self, attribute_name: str, leaves: tuple[Leaf, ...]) -> None:
        """Check the module's annotations of its inputs and outputs, if it has any."""
        all_attributes = self.functions["main"].attributes.get(attribute_name, [])
        for leaf, attributes in zip(leaves, all_attributes, strict=False):
            if "sdy.sharding" in attributes:
                (spec,) = _specs(attributes["sdy.sharding"], 1)
                self._check_spec(leaf, spec, "the module has it as")

    def _check_spec(self, leaf: Leaf, spec: Spec, statement: str) -> None:
        known = {axis for axes in spec for axis in axes} <= set(self.mesh) and len(spec) == len(leaf.shape)
        if not known or without_size_one(spec, self.mesh) != without_size_one(leaf.spec, self.mesh):
            raise ProgramError(
                f"{leaf.name}: {statement} {list(spec)} and the signature as {list(leaf.spec)}; "
                "the compiler would move data"
            )

    def _block(self, block: Any, known: dict[int, Value], depth: int) -> Block:
        if depth > MAX_DEPTH:
            raise ProgramError(f"the program nests more than {MAX_DEPTH} deep")
        result = Block([self._type(argument.type).copy() for argument in block.arguments])
        known.update({hash(a): v for a, v in zip(block.arguments, result.arguments, strict=True)})
        for text in self._texts(block):
            self._op(text, result, known, depth)
        return result

    def _texts(self, block: Any) -> Iterator[_Text]:
        """The block's operations; those of a function that is called often are read from MLIR once."""
        if (texts := self.texts.get(hash(block))) is None:
            texts = []
            for op in block.operations:
                texts.append(self._text(op.operation))
                yield texts[-1]
            self.texts[hash(block)] = texts
        else:
            yield from texts

    def _text(self, op: Any) -> _Text:
        """Read one operation from MLIR."""
        operands = [hash(operand) for operand in op.operands]
        if op.name in _RETURNS:
            return _Text(op, "return", operands)
        results = {hash(result): self._type(result.type) for result in op.results}
        line = source_line(op)
        text = _Text(op, "", operands, results, line, function_name(op) if line else "")
        if callee := called(op):
            text.inlined = self.functions[callee].regions[0].blocks[0]
        elif self.lenient and op.name == "sdy.manual_computation":  # on one device
            text.inlined, text.captures = op.regions[0].blocks[0], True
        elif self.lenient and op.name in _ANNOTATIONS:
            text.kind = "annotation"
        else:
            text.kind = kind_of(op, line or self.line, self.lenient)
            if text.kind in COLLECTIVES:
                check_groups(op, text.kind, line or self.line)
            text.attributes = attributes_of(op, self.meshes if self.lenient else {})
            text.regions = [region.blocks[0] for region in op.regions]
        return text

    def _type(self, kind: Any) -> Value:
        """A value of an MLIR type, of which others are copies."""
        if kind not in self.types:
            self.types[kind] = value_of(kind)
        return self.types[kind]

    def _op(self, text: _Text, block: Block, known: dict[int, Value], depth: int) -> None:
        self.count += 1
        if self.count > MAX_OPS:
            raise ProgramError(f"the program has more than {MAX_OPS:,} operations; use lax.scan instead of unrolling")
        operands = [known[operand] for operand in text.operands]
        if text.kind == "return":
            block.returns = operands
        elif text.kind == "annotation":
            known.update(zip(text.results, operands, strict=True))
        elif text.inlined is not None:
            values = self._inline(text, operands, block, known if text.captures else {}, depth)
            known.update(zip(text.results, values, strict=True))
        else:
            results = [value.copy() for value in text.results.values()]
            known.update(zip(text.results, results, strict=True))
            attributes = dict(text.attributes)
            if text.op.name in MATMULS:
                operands, attributes = as_product(text.op.name, operands, results[0], attributes)
            if text.kind in ("while", "case"):
                attributes["number"] = self.controls  # in program order, calls inlined, as ``witness`` counts them
                self.controls += 1
            regions = [self._block(region, known, depth + 1) for region in text.regions]
            line, function = (text.line, text.function) if text.line else (self.line, self.function)
            block.ops.append(Op(text.kind, operands, results, attributes, regions, line, function))

    def _inline(
        self, text: _Text, operands: list[Value], block: Block, known: dict[int, Value], depth: int
    ) -> list[Value]:
        if depth > MAX_DEPTH:
            raise ProgramError(f"calls nest more than {MAX_DEPTH} deep")
        known.update({hash(a): v for a, v in zip(text.inlined.arguments, operands, strict=True)})
        inner = Block([])
        outer = self.line, self.function
        if text.line:
            self.line, self.function = text.line, text.function
        for inlined in self._texts(text.inlined):
            self._op(inlined, inner, known, depth + 1)
        self.line, self.function = outer
        block.ops += inner.ops
        return inner.returns


def _specs(attribute: Any, count: int) -> list[Spec]:
    """The specs of a list of shardings, which must be plain: whole axes, in order, and nothing else."""
    text = str(attribute)
    parts = list(_SHARDING.finditer(text))
    joined = ", ".join(part[0] for part in parts)
    plain = text in (f"#sdy.sharding_per_value<[{joined}]>", f"#sdy.sharding{joined}")
    if not plain or len(parts) != count:
        raise ProgramError(f"the module's shardings are {text[:200]}, expected {count} that split by whole axes")
    return [
        tuple(tuple(re.findall(r'"([^"]+)"', dim)) for dim in re.findall(r"\{([^{}]*)\}", part[1])) for part in parts
    ]


def _is_constant(op: Any) -> bool:
    return op.operation.name == "stablehlo.constant"

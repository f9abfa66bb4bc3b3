"""What a Program does as one short text: the same for programs that differ in order, names, lines and unused work."""

from __future__ import annotations

import hashlib

import numpy as np

from course.program.ir import Block, Module, Op, Value

_COMMUTES = {"add", "and", "maximum", "minimum", "multiply", "or", "xor"}
_NUMBERED = {"channel_handle"}  # in the order in which collectives are written


def form(module: Module) -> str:
    """A hash of the module's results, each of which is an operation with its attributes on what it reads.

    So it tells apart what is computed, and neither the order in which that is written nor how often.
    """
    return _block(module.main, {}, 0)[:16]


def _block(block: Block, known: dict[Value, str], depth: int) -> str:
    """The hash of what a block gives; ``known`` has those of the values outside of it, and gets those inside."""
    for number, argument in enumerate(block.arguments):
        known[argument] = _hash("argument", depth, number, argument.shape, argument.dtype)
    for op in block.ops:
        made = _op(op, known, depth)
        for number, result in enumerate(op.results):
            known[result] = _hash(made, number)
    return _hash(*(known[value] for value in block.returns))


def _op(op: Op, known: dict[Value, str], depth: int) -> str:
    reads = [known[value] for value in op.operands]
    attributes = [(name, _text(value)) for name, value in sorted(op.attributes.items()) if name not in _NUMBERED]
    shapes = [(result.shape, result.dtype) for result in op.results]
    regions = [_block(region, known, depth + 1) for region in op.regions]
    return _hash(op.kind, sorted(reads) if op.kind in _COMMUTES else reads, attributes, shapes, regions)


def _text(value: object) -> str:
    return str((value.shape, value.tolist())) if isinstance(value, np.ndarray) else str(value)


def _hash(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

"""A short text for what a Program does: the same for programs that differ in order, names, lines and unused work."""

from __future__ import annotations

import hashlib

import numpy as np

from course.program.ir import Block, Module, Op, Value

_COMMUTES = {"add", "and", "maximum", "minimum", "multiply", "or", "xor"}
_NUMBERED = {"channel_handle"}  # in the order in which collectives are written


def form(module: Module) -> str:
    """A hash of the module's results, each an operation with its attributes and operands.

    It distinguishes what is computed, but not the order or the number of times it is written.
    """
    return _block(module.main, {}, 0)[:16]


def _block(block: Block, known: dict[Value, str], depth: int) -> str:
    """The hash of a block's results; ``known`` has those of values outside the block, and receives those inside."""
    for number, argument in enumerate(block.arguments):
        known[argument] = _hash("argument", depth, number, argument.shape, argument.dtype)
    for op in block.ops:
        op_hash = _op(op, known, depth)
        for number, result in enumerate(op.results):
            known[result] = _hash(op_hash, number)
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

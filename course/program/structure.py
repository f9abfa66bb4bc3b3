"""Whether two Programs are the same program at different sizes."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from course.program.collectives import groups_of
from course.program.evaluate import decide, depends_on_device, executed
from course.program.ir import COLLECTIVES, Block, Module, Op, walk

# What XLA's front end adds or leaves out by size alone, without computing anything.
_IGNORED = {"constant", "reshape", "broadcast_in_dim", "convert"}


def difference(small: Module, large: Module) -> str:
    """Where the op sequences of two sizes of one program part, ignoring dims and constants; empty if nowhere."""
    for ours, theirs in _pad(_sequence(small.main, small.mesh, 0), _sequence(large.main, large.mesh, 0)):
        if ours is None or theirs is None or ours[0] != theirs[0]:
            here, there = (f"{op[0][1]} at {op[1] or 'unknown line'}" if op else "nothing" for op in (ours, theirs))
            return f"{here} at the small size is {there} at the large one"
    return _runs_less(small, large)


def _runs_less(small: Module, large: Module) -> str:
    """The first loop or branch that runs less often at the large size, where nobody sees whether values are right."""
    told_apart = depends_on_device(small) or depends_on_device(large)
    counts = [_executions(module, told_apart) for module in (small, large)]
    loops = [[op for op in walk(module.main) if op.kind in ("while", "case")] for module in (small, large)]
    for ours, theirs in zip(*loops, strict=False):
        first = 1 if ours.kind == "while" else 0  # a loop's condition runs once more than its body
        for mine, other in zip(ours.regions[first:], theirs.regions[first:], strict=False):
            before, now = counts[0][mine], counts[1][other]
            if now < before:
                what = "loop" if ours.kind == "while" else "branch"
                line = theirs.line or "unknown line"
                return f"the {what} at {line} runs {before} times at the small size and {now} times at the large one"
    return ""


def _executions(module: Module, told_apart: bool) -> Counter[Block]:
    """How often each block runs, on all devices together where they may decide differently, else on one."""
    count = math.prod(module.mesh.values()) if told_apart else 1
    found: Counter[Block] = Counter()
    for device in range(count):
        found.update(executed(module.main, iter(decide(module, device))))
    return found


def _changes_precision(op: Op) -> bool:
    """Whether an op makes one float of another; conversions of integers come and go with sizes."""
    return op.kind == "convert" and all(v.dtype.startswith(("f", "bf")) for v in (op.operands[0], op.results[0]))


def _pad(ours: list[Any], theirs: list[Any]) -> list[tuple[Any, Any]]:
    length = max(len(ours), len(theirs))
    return list(zip(ours + [None] * (length - len(ours)), theirs + [None] * (length - len(theirs)), strict=True))


def _sequence(block: Block, mesh: dict[str, int], depth: int) -> list[Any]:
    found: list[Any] = []
    for op in block.ops:
        if op.kind in _IGNORED and not _changes_precision(op):
            continue
        axes = groups_of(op, mesh).axes if op.kind in COLLECTIVES else ()
        multiplied = tuple(operand.dtype for operand in op.operands) if op.kind == "dot_general" else ()
        found.append(((depth, op.kind, tuple(result.dtype for result in op.results), axes, multiplied), op.line))
        for region in op.regions:
            found += _sequence(region, mesh, depth + 1)
    return found

"""Whether two Programs are the same program at different sizes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, zip_longest
from typing import Any

from course.program.collectives import groups_of
from course.program.evaluate import decide, depends_on_device, executed
from course.program.ir import COLLECTIVES, Block, Module, Op, Value, walk

# What XLA's front end adds or leaves out by size alone, without computing anything.
_IGNORED = {"constant", "reshape", "broadcast_in_dim", "convert"}


@dataclass(frozen=True)
class _Step:
    """One op as it is compared: what it is, whose results it reads, and which parts of arrays it keeps.

    ``reads`` names each operand by the step that made it and the number of the result, or as an argument of a block
    or a constant. ``kept`` holds, for an op that cuts an array or fills one up, the part's dims beside the whole's.
    """

    kind: str
    line: str
    what: tuple[Any, ...]
    reads: tuple[Any, ...]
    kept: tuple[tuple[int, int], ...] = ()


def difference(small: Module, large: Module) -> str:
    """Where two sizes of one program part, ignoring dims and constants; empty if nowhere.

    The ops must be the same in the same order, read each other's results in the same way, keep no smaller a share of
    what they cut, and run no less often.
    """
    for ours, theirs in zip_longest(_steps(small), _steps(large)):
        if ours is None or theirs is None or ours.what != theirs.what:
            return f"{_named(ours)} at the small size is {_named(theirs)} at the large one"
        if ours.reads != theirs.reads:
            return f"{_named(theirs)} reads other values at the large size than at the small one"
        shares = zip(ours.kept, theirs.kept, strict=True)
        if any(now * before_whole < before * now_whole for (before, before_whole), (now, now_whole) in shares):
            return f"{_named(theirs)} keeps a smaller part at the large size than at the small one"
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
    devices = math.prod(module.mesh.values()) if told_apart else 1
    found: Counter[Block] = Counter()
    for device in range(devices):
        found.update(executed(module.main, iter(decide(module, device))))
    return found


def _changes_precision(op: Op) -> bool:
    """Whether an op makes one float of another; conversions of integers come and go with sizes."""
    return op.kind == "convert" and all(v.dtype.startswith(("f", "bf")) for v in (op.operands[0], op.results[0]))


def _named(step: _Step | None) -> str:
    if step is None or step.kind == "return":
        return "nothing"
    return f"{step.kind} at {step.line or 'unknown line'}"


def _steps(module: Module) -> list[_Step]:
    steps: list[_Step] = []
    _read(module.main, module.mesh, 0, steps, {}, count())
    return steps


def _read(
    block: Block, mesh: dict[str, int], depth: int, steps: list[_Step], origin: dict[Value, Any], blocks: Iterator[int]
) -> None:
    number = next(blocks)
    origin |= {argument: ("argument", number, index) for index, argument in enumerate(block.arguments)}
    for op in block.ops:
        if op.kind in _IGNORED and not _changes_precision(op):
            # Those with an operand pass its value on.
            made = origin[op.operands[0]] if op.operands else "constant"
            origin |= dict.fromkeys(op.results, made)
            continue
        axes = groups_of(op, mesh).axes if op.kind in COLLECTIVES else ()
        multiplied = tuple(operand.dtype for operand in op.operands) if op.kind == "dot_general" else ()
        what = (depth, op.kind, tuple(result.dtype for result in op.results), axes, multiplied)
        origin |= {result: (len(steps), index) for index, result in enumerate(op.results)}
        steps.append(_Step(op.kind, op.line, what, tuple(origin[operand] for operand in op.operands), _kept(op)))
        for region in op.regions:
            _read(region, mesh, depth + 1, steps, origin, blocks)
    steps.append(_Step("return", "", (depth, "return"), tuple(origin[value] for value in block.returns)))


def _kept(op: Op) -> tuple[tuple[int, int], ...]:
    if op.kind in ("slice", "dynamic_slice"):
        part, whole = op.results[0], op.operands[0]
    elif op.kind == "dynamic_update_slice":
        part, whole = op.operands[1], op.operands[0]
    elif op.kind == "pad":
        part, whole = op.operands[0], op.results[0]
    else:
        return ()
    return tuple(zip(part.shape, whole.shape, strict=True))

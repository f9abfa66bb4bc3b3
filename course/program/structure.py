"""Check that two Programs are the same program at different sizes.

The small one is run and its values are checked; the large one is only analysed. The analyses of the large one count
because it is the same program: operation for operation, on arrays that scale. ``scaling`` has the allowed differences.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cached_property
from itertools import zip_longest

from course.program.effects import depending, without_effect
from course.program.evaluate import depends_on_device, executed, follow
from course.program.ir import Block, Module, Op, Value, walk
from course.program.pieces import Joined, turned
from course.program.scaling import character, out_of_scale, parts_of, same_attributes, shrinks


class _Differs(Exception):
    """Raised when the two programs differ; the message says where and how."""


def structural_mismatch(small: Module, large: Module, *, scaled: bool = True) -> str:
    """Describe the first mismatch between two sizes of one program; empty if there is none.

    The ops must be the same in the same order, with the same attributes up to sizes, read each other's results in the
    same way, run no less often, and do the same to arrays that scale: see ``scaling``. If only some sizes differ,
    ``scaled`` is false: arrays do not scale then, and the only requirement is that no dim shrinks.
    """
    try:
        twins = _Twins(small, large, scaled)
        twins.compare(small.main, large.main)
    except _Differs as differs:
        return str(differs)
    return _runs_less(twins)


class _Twins:
    """Walks two programs in parallel."""

    def __init__(self, small: Module, large: Module, scaled: bool):
        self.scaled, self.modules = scaled, (small, large)
        ops = [op for module in (small, large) for op in walk(module.main)]
        self.constants = {op.results[0]: character(op) for op in ops if op.kind == "constant"}
        self.twin: dict[Value, Value] = {}  # from values of the large program to those of the small one
        self.from_inputs, self.idle = depending(large.main), without_effect(large.main)
        self.joined = Joined(turned=turned(large.main)).follow(small.main, large.main)
        integers = [pair for pair in zip(small.main.arguments, large.main.arguments) if "i" in pair[1].dtype]  # noqa: B905
        dims = [dim for ours, theirs in integers for dim in zip(ours.shape, theirs.shape, strict=False)]
        self.integer_growth = min((now / before for before, now in dims if 0 < before < now), default=math.inf)

    def compare(self, ours: Block, theirs: Block, owner: Op | None = None) -> None:
        """Raise ``_Differs`` unless two blocks are the same at two sizes; ``owner`` is the large block's op."""
        name = _named(owner) if owner else "the program"
        self._compare_values(ours.arguments, theirs.arguments, name)
        small, large = ([op for op in block.ops if op.kind != "constant"] for block in (ours, theirs))
        for mine, other in zip_longest(small, large):
            if mine is None or other is None or mine.kind != other.kind:
                raise _Differs(f"{_named(mine)} at the small size is {_named(other)} at the large one")
            self._compare_op(mine, other, (ours, theirs))
        self._compare_reads(ours.returns, theirs.returns, name)

    def _compare_op(self, ours: Op, theirs: Op, blocks: tuple[Block, Block]) -> None:
        name = _named(theirs)
        self._compare_reads(ours.operands, theirs.operands, name)
        self._compare_values(ours.results, theirs.results, name)
        if not same_attributes(ours, theirs) or len(ours.regions) != len(theirs.regions):
            raise _Differs(f"{name} goes along other dims, or in another way, at the large size than at the small one")
        known = self.from_inputs, self.idle, self.integer_growth, self.joined
        mismatch = out_of_scale(ours, theirs, *known) if self.scaled else ""
        if mismatch and not self._in_more_trips(ours, theirs, blocks):
            raise _Differs(f"{name} {mismatch}")
        for mine, other in zip(ours.regions, theirs.regions, strict=True):
            self.compare(mine, other, theirs)

    def _in_more_trips(self, ours: Op, theirs: Op, blocks: tuple[Block, Block]) -> bool:
        """Check that a loop takes or updates a smaller part per trip, and makes correspondingly more trips."""
        if theirs.kind not in ("dynamic_slice", "dynamic_update_slice"):
            return False
        runs = [executions[block] for executions, block in zip(self.executions, blocks, strict=True)]
        part, whole = parts_of(ours, theirs)
        less = math.prod(
            min(1.0, now * all_then / (then * all_now))
            for (then, now), (all_then, all_now) in zip(part, whole, strict=True)
            if then
        )
        return runs[0] > 0 and less * runs[1] >= runs[0] * (1 - 1e-9)

    @cached_property
    def executions(self) -> list[Counter[Block]]:
        """Execution counts of each block, for both programs."""
        device_dependent = any(map(depends_on_device, self.modules))
        return [_executions(module, device_dependent) for module in self.modules]

    def _compare_values(self, ours: list[Value], theirs: list[Value], name: str) -> None:
        if len(ours) != len(theirs):
            raise _Differs(f"{name} has {len(ours)} values at the small size and {len(theirs)} at the large one")
        for mine, other in zip(ours, theirs, strict=True):
            if mine.dtype != other.dtype or shrinks(mine, other):
                before, now = (f"{v.dtype}{list(v.shape)}" for v in (mine, other))
                raise _Differs(f"{name} has {before} at the small size and {now} at the large one: no dim may shrink")
            self.twin[other] = mine

    def _compare_reads(self, ours: list[Value], theirs: list[Value], name: str) -> None:
        if len(ours) != len(theirs) or not all(map(self._same, ours, theirs)):
            raise _Differs(f"{name} reads other values at the large size than at the small one")

    def _same(self, ours: Value, theirs: Value) -> bool:
        """Check that two operands are produced in the same way."""
        if theirs in self.twin:
            return self.twin[theirs] is ours
        if ours not in self.constants or ours.dtype != theirs.dtype or shrinks(ours, theirs):
            return False
        return self.constants[ours] == self.constants[theirs]


def _runs_less(twins: _Twins) -> str:
    """The first loop or branch that runs less often at the large size, where no values are checked."""
    loops = [[op for op in walk(module.main) if op.kind in ("while", "case")] for module in twins.modules]
    if not loops[0]:
        return ""
    counts = twins.executions
    for ours, theirs in zip(*loops, strict=True):
        first = 1 if ours.kind == "while" else 0  # a loop's condition runs once more than its body
        for mine, other in zip(ours.regions[first:], theirs.regions[first:], strict=True):
            before, now = counts[0][mine], counts[1][other]
            if now < before:
                kind = "loop" if ours.kind == "while" else "branch"
                line = theirs.line or "unknown line"
                return f"the {kind} at {line} runs {before} times at the small size and {now} times at the large one"
    return ""


def _executions(module: Module, device_dependent: bool) -> Counter[Block]:
    """Execution counts of each block: the sum over all devices if they may decide differently, otherwise for one."""
    devices = math.prod(module.mesh.values()) if device_dependent else 1
    total: Counter[Block] = Counter()
    for device in range(devices):
        total.update(executed(module.main, iter(follow(module, device).decisions)))
    return total


def _named(op: Op | None) -> str:
    return f"{op.name} at {op.line or 'unknown line'}" if op else "nothing"

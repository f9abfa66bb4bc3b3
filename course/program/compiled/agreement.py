"""Check that a Program's exports for CPUs and for GPUs are the same program, as far as the analyses can tell."""

from __future__ import annotations

from collections import Counter
from typing import Any

from course.program.costs import Costs, costs
from course.program.ir import Module, walk


def disagreement(cpu: Module, cuda: Module) -> str:
    """Describe the first difference between two exports in collectives or matmuls; empty if there is none.

    Everything else may differ: for example, random bits are lowered differently.

    Args:
        cpu, cuda: ``parse(program)`` of either export.

    Raises:
        ProgramError: A trip count or a branch cannot be resolved.
    """
    ours, theirs = costs(cpu), costs(cuda)
    differences = [
        f"{kind} over {','.join(axes)} of {size:,} bytes {dtype}: {counts}"
        for (kind, axes, dtype, size), counts in _differences(_sent(ours), _sent(theirs))
    ]
    differences += [
        f"products of {left[1]}{list(left[0])} and {right[1]}{list(right[0])} written: {counts}"
        for (left, right), counts in _differences(_products(cpu), _products(cuda))
    ]
    if not differences and ours.flops != theirs.flops:
        differences = [f"FLOPs of matmuls: {ours.flops:,.0f} for CPUs, {theirs.flops:,.0f} for GPUs"]
    return "; ".join(differences)


def _sent(module_costs: Costs) -> Counter[Any]:
    """Execution counts of collectives, by their properties."""
    counts: Counter[Any] = Counter()
    for c in module_costs.collectives:
        counts[c.kind, c.axes, c.dtype, c.operand_bytes] += c.count
    return counts


def _products(module: Module) -> Counter[Any]:
    """Number of products in the module, by shape and dtype of both operands."""
    dots = (op for op in walk(module.main) if op.kind == "dot_general")
    return Counter(tuple((operand.shape, operand.dtype) for operand in op.operands) for op in dots)


def _differences(ours: Counter[Any], theirs: Counter[Any]) -> list[tuple[Any, str]]:
    return [
        (key, f"{ours[key]} for CPUs, {theirs[key]} for GPUs")
        for key in dict.fromkeys((*ours, *theirs))
        if ours[key] != theirs[key]
    ]

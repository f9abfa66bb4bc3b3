"""Slices, reductions and other ops that move integers: the evaluator compared with XLA, as the executor runs it."""

import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course.program.stablehlo_for_tests import NAMES, dense, edges, evaluated, program_of, run, tensor
from course.program.witness_test import SETTINGS

FULL = bool(os.environ.get("MESHCRAFT_FULL"))
pytestmark = pytest.mark.usefixtures("settings_of_the_executor")


@st.composite
def moves(draw):
    """One operation that moves or gathers numbers: its text with ``{0}`` for operands, the operands, and its result."""
    element = draw(st.sampled_from(list(NAMES)))
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    values = edges(element)

    def array(shape, pool=values):
        indices = draw(st.lists(st.integers(0, len(pool) - 1), min_size=math.prod(shape), max_size=math.prod(shape)))
        return pool[np.array(indices, int)].reshape(shape)

    def starts():
        kind = draw(st.sampled_from([name for name in NAMES if name != "i1"]))
        pool = np.array([start for start in edges(kind) if -(2**31) <= int(start) < 2**31 or draw(st.booleans())])
        return [array((), pool) for _ in shape], ", ".join([tensor((), kind)] * len(shape))

    x, t = array(shape), tensor(shape, element)
    part = tuple(draw(st.integers(1, dim)) for dim in shape)
    names = ", ".join(f"{{{i + 1}}}" for i in range(len(shape)))
    order = draw(st.permutations(range(len(shape))))
    kinds = (
        "slice dynamic_slice dynamic_update_slice broadcast iota reduce reverse concatenate transpose reshape constant"
    )
    kind = draw(st.sampled_from(kinds.split()))
    if kind == "slice":
        cuts = [(dim - size, dim, draw(st.integers(1, 2))) for dim, size in zip(shape, part, strict=True)]
        result = tuple(-(-(stop - start) // step) for start, stop, step in cuts)
        text = ", ".join(f"{start}:{stop}:{step}" for start, stop, step in cuts)
        return f"stablehlo.slice {{0}} [{text}] : ({t}) -> {tensor(result, element)}", [x], (result, element)
    if kind == "dynamic_slice":
        start_values, types = starts()
        rest = f"{names}, sizes = {list(part)} : ({t}, {types}) -> {tensor(part, element)}"
        return f"stablehlo.dynamic_slice {{0}}, {rest}", [x, *start_values], (part, element)
    if kind == "dynamic_update_slice":
        start_values, types = starts()
        update, last, of_part = array(part), len(shape) + 1, tensor(part, element)
        text = f"stablehlo.dynamic_update_slice {{0}}, {{{last}}}, {names} : ({t}, {of_part}, {types}) -> {t}"
        return text, [x, *start_values, update], (shape, element)
    if kind == "broadcast":
        result = [3] * (len(shape) + 1)
        for dim, place in enumerate(order):
            result[place] = shape[dim]
        text = f"stablehlo.broadcast_in_dim {{0}}, dims = {list(order)} : ({t}) -> {tensor(result, element)}"
        return text, [x], (tuple(result), element)
    if kind == "iota":
        number = element if element != "i1" else "i8"
        return f"stablehlo.iota dim = {order[0]} : {tensor(shape, number)}", [], (shape, number)
    if kind == "reduce":
        dims = sorted(order[: draw(st.integers(1, len(shape)))])
        result = tuple(size for dim, size in enumerate(shape) if dim not in dims)
        by = draw(st.sampled_from(["maximum", "minimum", "and", "or", *(["add", "multiply"] * (element != "i1"))]))
        types = f"({t}, {tensor((), element)}) -> {tensor(result, element)}"
        text = f"stablehlo.reduce({{0}} init: {{1}}) applies stablehlo.{by} across dimensions = {dims} : {types}"
        neutral = {"add": 0, "multiply": 1, "maximum": values[0], "minimum": values[-1], "and": -1, "or": 0}[by]
        initial = array(()) if draw(st.integers(0, 3)) == 0 else np.array(neutral).astype(values.dtype)
        return text, [x, initial], (result, element)
    if kind == "reverse":
        return f"stablehlo.reverse {{0}}, dims = {sorted(order[:1])} : {t}", [x], (shape, element)
    if kind == "concatenate":
        result = tuple(2 * size if dim == order[0] else size for dim, size in enumerate(shape))
        text = f"stablehlo.concatenate {{0}}, {{1}}, dim = {order[0]} : ({t}, {t}) -> {tensor(result, element)}"
        return text, [x, array(shape)], (result, element)
    if kind == "transpose":
        result = tuple(shape[dim] for dim in order)
        text = f"stablehlo.transpose {{0}}, dims = {list(order)} : ({t}) -> {tensor(result, element)}"
        return text, [x], (result, element)
    if kind == "reshape":
        result = (1, math.prod(shape))
        return f"stablehlo.reshape {{0}} : ({t}) -> {tensor(result, element)}", [x], (result, element)
    return f"stablehlo.constant {dense(x)} : {t}", [], (shape, element)


@settings(max_examples=20 if FULL else 2, **SETTINGS)
@given(st.lists(moves(), min_size=60, max_size=60))
def test_moves_and_reductions_agree_with_xla(several):
    lines, arrays = [], []
    for i, (text, given_to, _) in enumerate(several):
        names = [f"%x{len(arrays) + j}" for j in range(len(given_to))]
        lines.append(f"%y{i} = {text.format(*names)}")
        arrays += given_to
    inputs = [(np.shape(x), next(e for e, name in NAMES.items() if name == x.dtype.name)) for x in arrays]
    program = program_of("\n".join(lines), inputs, [kind for *_, kind in several])
    ours, computed = evaluated(program, arrays), run(program, arrays)
    for (text, _, _), known, result in zip(several, ours, computed, strict=True):
        assert known is None or np.array_equal(known, result), (text, known, result)
    assert sum(known is not None for known in ours) > len(several) / 2

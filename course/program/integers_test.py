"""Every arithmetic operation of the evaluator compared with XLA as the executor runs it, where machines differ most."""

import itertools
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from course.program import export, parse
from course.program.integers import MAX_REMEMBERED, RULES, evaluate
from course.program.ir import Op, Value
from course.program.stablehlo_for_tests import NAMES, dense, edges, evaluated, program_of, run, tensor

COMPARISONS = ("EQ", "NE", "LT", "LE", "GT", "GE")
ARITHMETIC = ("add", "multiply", "maximum", "minimum", "and", "or", "xor")
NUMBERS = ("subtract", "divide", "remainder", "shift_left", "shift_right_arithmetic", "shift_right_logical")
FULL = bool(os.environ.get("MESHCRAFT_FULL"))
pytestmark = pytest.mark.usefixtures("settings_of_the_executor")


def elementwise(element):
    """Each operation, its text (for a number a, others b to d, and a boolean p), and the result's element type."""
    unsigned = element == "i1" or element.startswith("u")
    for kind in ARITHMETIC + (NUMBERS if element != "i1" else ()):
        by = "%d" if kind in ("divide", "remainder") else "%b"
        yield kind, f"stablehlo.{kind} %a, {by} : {{t}}", element
    for direction in COMPARISONS:
        for sign in ("", ", UNSIGNED" if unsigned else ", SIGNED"):
            yield (
                f"compare {direction}",
                f"stablehlo.compare {direction}, %a, %b{sign} : ({{t}}, {{t}}) -> {{r}}",
                "i1",
            )
    for kind in ["not", *(["negate", "abs", "sign"] if not unsigned else ["negate"] if element != "i1" else [])]:
        yield kind, f"stablehlo.{kind} %a : {{t}}", element
    for other in NAMES:
        yield f"convert to {other}", "stablehlo.convert %a : ({t}) -> {r}", other
    yield "select", "stablehlo.select %p, %a, %b : {p}, {t}", element
    if element != "i1":  # XLA has no clamp of booleans
        yield "clamp", "stablehlo.clamp %a, %b, %c : {t}", element


def text_of(cases, element, shape, names):
    lines = []
    for i, (_, template, result) in enumerate(cases):
        text = template.format(t=tensor(shape, element), r=tensor(shape, result), p=tensor(shape, "i1"))
        lines.append(f"%y{i} = " + re.sub(r"%([abcdp])\b", lambda match: names[match[1]], text))
    return "\n".join(lines)


def operands(element, seed=0, num_random=0):
    """Pairs of edge values, each with further values and a boolean: a hundred, or all and ``num_random`` more."""
    random = np.random.default_rng(seed)
    values = edges(element)
    pairs = np.array(list(itertools.product(values, values)), values.dtype)
    a, b = (pairs if num_random else random.permutation(pairs)[:100]).T
    if num_random:
        low, high = (0, 1) if element == "i1" else (np.iinfo(values.dtype).min, np.iinfo(values.dtype).max)
        a, b = (
            np.concatenate(
                [
                    column,
                    random.integers(
                        low, high, num_random, values.dtype if element != "i1" else np.int8, endpoint=True
                    ).astype(values.dtype),
                ]
            )
            for column in (a, b)
        )
    overflow = (a == values[0]) & (b == values.dtype.type(-1)) if values[0] < 0 else np.zeros(len(a), bool)
    # XLA crashes while compiling a division by zero, or of the minimum by -1
    divisor = np.where(overflow | (b == 0), values.dtype.type(1), b)
    return a, b, random.choice(values, len(a)), divisor, random.integers(0, 2, len(a)).astype(bool)


def compare_elementwise(element, num_random=0):
    """The number of compared values, the differences by operation, and the inputs for which operations are unknown."""
    cases, arrays = list(elementwise(element)), operands(element, num_random=num_random)
    count = len(arrays[0])
    inputs = [((count,), element)] * 4 + [((count,), "i1")]
    outputs = [((count,), result) for _, _, result in cases]
    names = {name: f"%x{i}" for i, name in enumerate("abcdp")}
    as_arguments = program_of(text_of(cases, element, (count,), names), inputs, outputs)
    constants = "\n".join(
        f"%{name} = stablehlo.constant {dense(array)} : {tensor(*kind)}"
        for name, array, kind in zip("abcdp", arrays, inputs, strict=True)
    )
    body = f"{constants}\n{text_of(cases, element, (count,), {name: f'%{name}' for name in 'abcdp'})}"
    as_constants = program_of(body, [], outputs)
    computed, folded = run(as_arguments, arrays), run(as_constants, [])
    main = parse(as_arguments).main
    compared, differ, unknown = 0, [], {}
    for op in main.ops:
        i = main.returns.index(op.results[0])
        ours, is_known = one_by_one(op, dict(zip(main.arguments, arrays, strict=True)))
        compared += 2 * int(is_known.sum())
        wrong = is_known & ((ours != computed[i]) | (ours != folded[i]))
        differ += [
            (cases[i][0], *(x[at].item() for x in (*arrays, ours, computed[i], folded[i])))
            for at in np.flatnonzero(wrong)
        ]
        unknown[cases[i][0]] = [tuple(x[at].item() for x in arrays) for at in np.flatnonzero(~is_known)]
    return compared, differ, unknown


def one_by_one(op, known):
    """The evaluator's result for each element alone, where known: unknown elements must not hide others."""
    evaluate(op, known, 0)
    if op.results[0] in known:
        return known[op.results[0]], np.ones(op.results[0].shape, bool)
    result, values = op.results[0], [op.results[0], *op.operands]
    whole, shape = {value: known[value] for value in op.operands}, result.shape
    for value in values:
        value.shape = ()
    computed = np.zeros(shape, NAMES[result.dtype])
    is_known = np.zeros(shape, bool)
    for at in range(shape[0]):
        known = {value: np.asarray(array[at]) for value, array in whole.items()}
        evaluate(op, known, 0)
        is_known[at] = result in known
        computed[at] = known.get(result, 0)
    for value in values:
        value.shape = shape
    return computed, is_known


def test_elementwise_operations_agree_with_xla():
    total = 0
    for element in NAMES if FULL else ("i1", "i8", "i32", "ui32", "i64"):
        compared, differ, _ = compare_elementwise(element, num_random=3000 if FULL else 0)
        assert differ == []
        total += compared
    print(f"{total:,} comparisons of the evaluator with XLA, 0 differences")
    assert total > (1_000_000 if FULL else 20_000)


def test_a_wrong_rule_is_noticed(monkeypatch):
    monkeypatch.setitem(RULES, "divide", lambda op, a, b: a // b if np.all(b != 0) else None)
    _, differ, _ = compare_elementwise("i8")
    assert {name for name, *_ in differ} == {"divide"}


@pytest.mark.parametrize(
    ("kind", "element", "numbers", "result"),
    [
        ("divide", "i32", (-(2**31), -1), "i32"),
        ("remainder", "i32", (-(2**31), -1), "i32"),
        ("divide", "ui8", (1, 0), "ui8"),
        ("remainder", "i64", (1, 0), "i64"),
        ("abs", "i8", (-128,), "i8"),
        ("negate", "i16", (-(2**15),), "i16"),
        ("negate", "ui32", (1,), "ui32"),
        ("add", "i8", (127, 1), "i8"),
        ("subtract", "ui32", (0, 1), "ui32"),
        ("multiply", "ui32", (2**16, 2**16), "ui32"),
        ("multiply", "ui64", (2**63, 2), "ui64"),
        ("add", "i1", (True, True), "i1"),
        ("multiply", "i1", (True, True), "i1"),
        ("shift_left", "i32", (1, 32), "i32"),
        ("shift_right_logical", "i8", (1, -1), "i8"),
        ("shift_right_arithmetic", "ui64", (1, 64), "ui64"),
        ("convert", "i32", (300,), "i8"),
        ("convert", "i32", (-1,), "ui32"),
        ("convert", "ui32", (2**31,), "i32"),
        ("clamp", "i32", (3, 1, 2), "i32"),
        ("popcnt", "i32", (1,), "i32"),
        ("power", "i32", (2, 2), "i32"),
    ],
)
def test_what_compilers_may_differ_on_is_unknown(kind, element, numbers, result):
    operands = [Value((), element, 8) for _ in numbers]
    op = Op(kind, operands, [Value((), result, 8)], {}, [], "")
    known = {value: np.array(x, NAMES[element]) for value, x in zip(operands, numbers, strict=True)}
    evaluate(op, known, 0)
    assert op.results[0] not in known


def test_comparison_of_another_signedness_than_its_operands_is_unknown():
    operands = [Value((), "i32", 32) for _ in range(2)]
    for kind, is_known in (("SIGNED", True), ("NOTYPE", True), ("UNSIGNED", False), ("FLOAT", False)):
        attributes = {"comparison_direction": "#c<LT>", "compare_type": f"#stablehlo<comparison_type {kind}>"}
        op = Op("compare", operands, [Value((), "i1", 8)], attributes, [], "")
        known = {value: np.array(-1, np.int32) for value in operands}
        evaluate(op, known, 0)
        assert (op.results[0] in known) == is_known


@pytest.mark.parametrize(
    ("element", "start"), [("ui32", 2**31), ("i64", 2**31), ("i64", -(2**31) - 1), ("ui64", 2**63)]
)
def test_start_that_does_not_fit_32_bits_is_unknown(element, start):
    table, index = Value((4,), "i32", 32), Value((), element, 64)
    op = Op("dynamic_slice", [table, index], [Value((1,), "i32", 32)], {"slice_sizes": (1,)}, [], "")
    known = {table: np.arange(4, dtype=np.int32), index: np.array(start, NAMES[element])}
    evaluate(op, known, 0)
    assert op.results[0] not in known


TABLE, AT = np.random.default_rng(0).integers(-5, 5, (3, 4), np.int32), np.array([2, 0, 3], np.int32)
LOOKUPS = {
    "take": lambda table, at: jnp.take(table, at[0]),
    "take of rows": lambda table, at: jnp.take(table, at - 1, axis=0),
    "take, clipped": lambda table, at: jnp.take(table, 2 * at, axis=1, mode="clip"),
    "take, wrapped": lambda table, at: jnp.take(table, 2 * at, axis=1, mode="wrap"),
    "take along an axis": lambda table, at: jnp.take_along_axis(table, at[:, None], axis=1),
    "get or fill": lambda table, at: table.at[0, 2 * at].get(mode="fill", fill_value=7),
    "of each row": lambda table, at: table[jnp.arange(3), at],
    "vmap": lambda table, at: jax.vmap(lambda row, i: row[i])(table, at),
    "vmap of parts": lambda table, at: jax.vmap(lambda i: lax.dynamic_slice(table, (i, i), (2, 3)))(at),
    "select": lambda table, at: jnp.select([at == 1, at == 0], [at, 2 * at], 9),
    "argmax": lambda table, at: jnp.argmax(table, axis=1),
    "argmin": lambda table, at: jnp.argmin(table, axis=0) + jnp.argmin(at),
    "argmax of booleans": lambda table, at: jnp.argmax(table > 0, axis=0),
    "pad": lambda table, at: jnp.pad(table, ((1, 0), (2, 3)), constant_values=at[0]),
    "sort": lambda table, at: jnp.sort(table, axis=0),
    "argsort": lambda table, at: jnp.argsort(table, axis=1, stable=True),
    "product": lambda table, at: at @ table,
    "einsum": lambda table, at: jnp.einsum("ij,kj->ki", table, table),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups_in_tables_agree_with_xla(name):
    arrays = {"table": TABLE, "at": AT}
    program = export(
        lambda table, at: {"y": LOOKUPS[name](table, at)},
        arrays,
        dict.fromkeys(arrays, P()),
        mesh={"x": 1},
        out_specs={"y": P()},
    )
    values = [arrays[leaf.name] for leaf in program.inputs]
    (computed,), (expected,) = evaluated(program, values), run(program, values)
    assert computed is not None
    np.testing.assert_array_equal(computed, expected)


def test_few_numbers_are_remembered_and_large_arrays_are_not():
    computed = {}
    for count in (4, MAX_REMEMBERED):
        shape = (count,)
        op = Op("add", [Value(shape, "i32", 32) for _ in range(2)], [Value(shape, "i32", 32)], {}, [], "")
        for times in (1, 3, 1):
            known = {value: np.int32(times) * np.arange(count, dtype=np.int32) for value in op.operands}
            evaluate(op, known, 0, computed)
            np.testing.assert_array_equal(known[op.results[0]], 2 * times * np.arange(count))
    assert len(computed) == 2, "one for each pair of operands of four elements"

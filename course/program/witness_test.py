"""A deliberately broken evaluator is contradicted by the devices' real decisions; honest Programs are not."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from course.mesh import abstract_mesh, make_mesh
from course.program import ProgramError, compile_program, evaluate, export, integers, parse
from course.program.stablehlo_for_tests import program_of

MESH = {"data": 4}
X = np.arange(8, dtype=np.float32)
FULL = bool(os.environ.get("MESHCRAFT_FULL"))

SETTINGS: Any = {
    "derandomize": True,
    "deadline": None,
    "phases": [Phase.generate],
    "suppress_health_check": [*HealthCheck],
}


def program(local, mesh=None):
    """``local(x, index)`` on every device of a mesh whose first axis splits the input; lines are this file's."""
    mesh = mesh or MESH
    axis = next(iter(mesh))

    def step(x):
        def inside(x):
            return local(x, lax.axis_index(axis))

        whole = jax.shard_map(inside, mesh=abstract_mesh(mesh), in_specs=P(axis), out_specs=P(axis), check_vma=False)
        return {"y": whole(x)}

    struct = jax.ShapeDtypeStruct(X.shape, X.dtype)
    locate = {__file__: "test"}.get
    return export(step, {"x": struct}, {"x": P(axis)}, mesh=mesh, out_specs={"y": P(axis)}, locate=locate)


def watched(program, **options):
    """Run the twin, compared with what the evaluator assumes."""
    return compile_program(program, make_mesh(program.mesh), parse(program, **options))({"x": X})["y"]


def two_ways(decide):
    """A function that takes one of two branches by ``decide(index)``."""
    return lambda x, index: lax.cond(decide(index), lambda x: x + 1, lambda x: x * 2, x)


def nested(x, index):
    """Loops in branches in loops, with calls from two places, and loops whose results are unused."""

    @jax.jit
    def either(x):
        return lax.cond(index % 2 == 1, lambda x: x + 1, lambda x: x * 2, x)

    def trip(x, i):
        shifted = lax.cond(i > index, lambda x: x - 1, lambda x: x, either(x))
        shifted = lax.ppermute(shifted, "data", [(0, 1), (1, 0)])
        return lax.fori_loop(0, index + i, lambda k, x: lax.switch(k, [either, jnp.sin, jnp.cos], x), shifted), None

    unused = lax.while_loop(lambda i: i < index + 5, lambda i: i + 2, 0)
    x, _ = lax.scan(trip, either(x) + 0 * unused, jnp.arange(3))
    lax.fori_loop(0, index, lambda _, x: either(x), x)
    return lax.fori_loop(0, 3, lambda _, x: either(x), x)


@pytest.mark.parametrize("mesh", [{"data": 4}, {"data": 2, "model": 2}, {"data": 1}, {"data": 1, "model": 4}])
def test_the_twin_computes_the_same(mesh):
    def local(x, index):
        return nested(x, index) if mesh["data"] == 4 else two_ways(lambda i: i == 1)(x, index + lax.psum(1, "data"))

    exported = program(local, mesh)
    plain = compile_program(exported, make_mesh(mesh))({"x": X})["y"]
    assert plain.tobytes() == watched(exported).tobytes()


def test_a_program_without_decisions_has_no_twin():
    exported = program(lambda x, _: lax.scan(lambda x, _: (x * 2, None), x, length=3)[0])
    assert compile_program(exported, make_mesh(MESH), parse(exported)).witness is None


def broken(kind, rule):
    return lambda patch: patch.setitem(integers.RULES, kind, rule)


def looked_up(index):
    return lax.dynamic_index_in_dim(jnp.array([7, 8, 9, 7]), index, keepdims=False)


def while_below(x, index):
    return lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 2, s[1] + 1), (index, x))[1]


def in_order(x, _):
    """Two trips on one branch and two on the other: counts alone do not determine the order."""
    first = two_ways(lambda i: i < 2)
    return lax.while_loop(lambda s: s[0] != 4, lambda s: (s[0] + 1, first(s[1], s[0])), (0, x))[1]


BROKEN = {
    "division": (broken("divide", lambda op, a, b: a // b), two_ways(lambda i: lax.div(i - 3, 2) == -1)),
    "remainder": (broken("remainder", lambda op, a, b: a % b), two_ways(lambda i: lax.rem(i - 2, 3) < 0)),
    "unsigned start": (
        broken("dynamic_slice", lambda op, a, *at: a[-1:] if at[0] < 0 else a[int(at[0]) :][:1]),
        two_ways(lambda i: lax.dynamic_slice(jnp.array([1, 0]), (i - 4,), (1,))[0] == 1),
    ),
    "signedness of a comparison": (
        broken("compare", lambda op, a, b: a.astype(np.uint32) < b.astype(np.uint32)),
        two_ways(lambda i: i - 2 < 1),
    ),
    "clamp": (broken("clamp", lambda op, low, x, high: x), two_ways(lambda i: lax.clamp(1, i, 2) == 0)),
    "reduction": (
        broken("reduce", lambda op, a, initial: a.max()),
        two_ways(lambda i: jnp.sum(jnp.array([1, 2]) * i, dtype=jnp.int32) == 3),
    ),
    "a table": (broken("select", lambda op, p, a, b: b), two_ways(lambda i: looked_up(jnp.where(i > 1, 2, 0)) == 9)),
    "conversion": (broken("convert", lambda op, a: a * 0), two_ways(lambda i: i.astype(jnp.int8) > 1)),
    "trips of a counted loop": (
        lambda patch: patch.setitem(integers.RULES, "compare", lambda op, a, b: a <= b),
        lambda x, _: lax.scan(lambda x, _: (x * 2, None), x, length=3)[0],
    ),
    "trips of another loop": (broken("compare", lambda op, a, b: a <= b), while_below),
    "order": (broken("compare", lambda op, a, b: a >= b if "LT" in op.attributes[DIRECTION] else a != b), in_order),
}
DIRECTION = "comparison_direction"


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_evaluator_is_contradicted(name, monkeypatch):
    plant, local = BROKEN[name]
    exported = program(local)
    watched(exported)
    plant(monkeypatch)
    with pytest.raises(ProgramError, match=r"^test:\d+: (case|while)( in \S+)?: .* than the cost analysis assumed"):
        watched(exported)


CASE = """
%index = stablehlo.constant dense<INDEX> : tensor<i32>
%y0 = "stablehlo.case"(%index) ({
  stablehlo.return %x0 : tensor<2xi32>
}, {
  %twice = stablehlo.add %x0, %x0 : tensor<2xi32>
  stablehlo.return %twice : tensor<2xi32>
}) : (tensor<i32>) -> tensor<2xi32>
"""


@pytest.mark.parametrize("index", [-1, 0, 1, 2, -(2**31)])
def test_an_index_without_a_branch_runs_the_last_one(index, monkeypatch):
    kinds = [((2,), "i32")]
    exported = program_of(CASE.replace("INDEX", str(index)), kinds, kinds)
    inputs = {exported.inputs[0].name: np.array([3, 4], np.int32)}
    mesh = make_mesh(exported.mesh)
    (result,) = compile_program(exported, mesh, parse(exported))(inputs).values()
    assert result.tolist() == ([3, 4] if index == 0 else [6, 8])
    monkeypatch.setattr(evaluate, "_side", lambda index, count: min(max(index, 0), count - 1))
    if index < 0:
        with pytest.raises(ProgramError, match="another branch runs on device 0"):
            compile_program(exported, mesh, parse(exported))(inputs)


def test_only_what_depends_on_data_by_permission_may_differ(monkeypatch):
    def local(x, index):
        x = lax.cond(x[0] > 2, lambda x: lax.fori_loop(0, 3, lambda _, x: x * 2, x), lambda x: x + 1, x)
        return two_ways(lambda i: lax.div(i - 3, 2) == -1)(x, index)

    exported = program(local)
    with pytest.raises(ProgramError, match="depends on data"):
        watched(exported)
    assert watched(exported, data_branches=True)[0] == 2
    monkeypatch.setitem(integers.RULES, "divide", lambda op, a, b: a // b)
    with pytest.raises(ProgramError, match="another branch runs"):
        watched(exported, data_branches=True)


def test_a_branch_on_data_costs_every_trip_of_its_loops():
    def local(x, _):
        small = lambda x: lax.fori_loop(0, 100, lambda _, x: x * 2, x)  # noqa: E731
        return lax.cond(x[0] > 2, small, lambda x: jnp.sin(jnp.cos(jnp.exp(x * 2 + 1) - 3)), x)

    exported = program(local)
    module = parse(exported, data_branches=True)
    assert sum(evaluate.follow(module, 0).decisions) > 100


def test_a_loop_in_a_condition_is_refused():
    def local(x, index):
        def condition(s):
            return lax.fori_loop(0, index, lambda i, n: n + i, s[0]) < 9

        return lax.while_loop(condition, lambda s: (s[0] + 1, s[1] * 2), (0, x))[1]

    with pytest.raises(
        ProgramError, match=r"test:\d+: while in lax.fori_loop: a loop's condition may not loop or branch"
    ):
        watched(program(local))


I32 = [
    jnp.add,
    jnp.subtract,
    jnp.multiply,
    lax.div,
    lax.rem,
    jnp.minimum,
    jnp.maximum,
    jnp.bitwise_and,
    jnp.bitwise_or,
    jnp.bitwise_xor,
    lambda a, b: a << (b & 7),
    lambda a, b: a >> (b & 31),
    lambda a, b: jnp.where(a < b, a, b + 1),
    jnp.floor_divide,
    jnp.remainder,
    lambda a, b: (a & 127).astype(jnp.int8).astype(jnp.int32) + b,
    lambda a, b: looked_up(a) - b,
    lambda a, b: lax.clamp(-3, a, 5) * b,
    lambda a, b: a.astype(bool).astype(jnp.int32) + b,
]
STEPS = st.tuples(st.integers(0, len(I32) - 1), st.integers(0, 5), st.integers(0, 5), st.integers(-9, 9))


def test_chains_of_integers_decide_as_the_devices_do():
    accepted = []

    @settings(max_examples=40 if FULL else 5, **SETTINGS)
    @given(st.lists(st.lists(STEPS, min_size=2, max_size=6), min_size=4, max_size=4))
    def decides_alike(chains):
        try:
            watched(program(lambda x, index: switched(chains, x, index)))
            accepted.append(True)
        except ProgramError as error:  # some values may be unknown, for example after overflow
            assert "depends on data" in str(error)
            accepted.append(False)

    decides_alike()
    assert sum(accepted) > len(accepted) / 2, accepted


def switched(chains, x, index):
    """Branches, and trips of loops, by the values of the chains on this device in each trip."""

    def value(chain, index, trip):
        values = [index, trip, index - 2, trip * 3]
        for kind, i, j, constant in chain:
            b = jnp.int32(constant) if j >= len(values) else values[j]
            values.append(I32[kind](values[i % len(values)], jnp.where(b == 0, 1, b)))
        return values[-1]

    def trip(x, i):
        for chain in chains:
            x = lax.switch(value(chain, index, i) & 3, [lambda x: x, jnp.sin, lambda x: x + 1], x)
        return lax.fori_loop(0, value(chains[0], index, i) & 3, lambda _, x: x * 2, x), None

    return lax.scan(trip, x, jnp.arange(4))[0]

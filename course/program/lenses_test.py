"""Analyses of a Program: costs compared with closed forms, structure, and refusals."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from course.machines import machine
from course.mesh import make_mesh
from course.program import Collective, ProgramError, compile_program, costs, export, memory, parse, timeline
from course.program.program_test import F32, program_of, struct


def ring_program(collective, out, mesh=None):
    return program_of(collective, {"x": struct(16, 8)}, {"x": P("data")}, out, mesh)


def locate_here(file):
    return "here" if file == __file__ else None


def split(local, *shape):
    """A Program of ``x``, ``[32, 4]`` by default, whose rows are split over 8 devices."""
    return program_of(local, {"x": struct(*(shape or (32, 4)))}, {"x": P("data")}, P("data"), locate=locate_here)


def costs_of(local, *shape):
    return costs(parse(split(local, *shape)))


# Costs


def scattered(x):
    return lax.psum_scatter(x, "data", scatter_dimension=1, tiled=True)


@pytest.mark.parametrize("n", [2, 8])
@pytest.mark.parametrize(
    ("kind", "collective", "out", "factor"),
    [
        ("all_gather", lambda x: lax.all_gather(x, "data", tiled=True), P("data"), lambda n: n - 1),
        ("reduce_scatter", scattered, P("data"), lambda n: (n - 1) / n),
        ("all_reduce", lambda x: lax.psum(x, "data"), P(), lambda n: 2 * (n - 1) / n),
        ("all_to_all", lambda x: lax.all_to_all(x, "data", 1, 0, tiled=True), P("data"), lambda n: (n - 1) / n),
        ("collective_permute", lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)]), P("data"), lambda n: 1),
    ],
)
def test_bytes_of_a_collective_equal_the_ring_closed_form(n, kind, collective, out, factor):
    mesh = {"data": n, "tensor": 8 // n}
    (counted,) = costs(parse(ring_program(collective, out, mesh))).collectives
    block = 16 // n * 8 * 4
    assert (counted.kind, counted.axes, counted.count) == (kind, ("data",), 1)
    assert counted.wire_bytes == pytest.approx(block * factor(n))


@pytest.mark.parametrize(
    ("pairs", "shift"),
    [
        ([(i, (i + 1) % 4) for i in range(4)], 1),
        ([(i, (i - 1) % 4) for i in range(4)], 3),
        ([(i, (i + 2) % 4) for i in range(4)], 2),
        ([(i, i + 1) for i in range(3)], 1),
        ([(0, 1), (1, 0)], None),
    ],
)
def test_a_permute_says_how_far_along_its_axis_it_sends(pairs, shift):
    for mesh in ({"data": 4, "tensor": 2}, {"tensor": 2, "data": 4}):
        program = ring_program(lambda x: lax.ppermute(x, "data", pairs), P("data"), mesh)
        (permute,) = costs(parse(program)).collectives
        assert (permute.kind, permute.axes, permute.shift) == ("collective_permute", ("data",), shift)
        assert msgspec.json.decode(msgspec.json.encode(permute), type=Collective) == permute
    (other,) = costs(parse(ring_program(lambda x: lax.psum(x, "data"), P(), {"data": 4}))).collectives
    assert other.shift is None


EVEN, ODD = ([(i, (i + 1) % 8) for i in range(first, 8, 2)] for first in (0, 1))
ONWARD, HOME = [(i, i + 1) for i in range(7)], [(7, 0)]


@pytest.mark.parametrize("pairs", [(EVEN, ODD), (ONWARD, HOME), (ONWARD[:4], ONWARD[4:], HOME)])
@pytest.mark.parametrize("trips", [1, 3])
def test_permutes_that_share_a_ring_are_counted_as_one_device_sends(pairs, trips):
    def local(x):
        pass_on = lambda x, _: (sum(lax.ppermute(x, "data", part) for part in pairs), None)  # noqa: E731
        return lax.psum(jnp.sum(lax.scan(pass_on, x, None, length=trips)[0]), "data") * x

    module = parse(split(local))
    collectives = costs(module).collectives
    permutes = [c for c in collectives if c.kind == "collective_permute"]
    assert sum(c.count for c in permutes) == trips * 2  # no device takes part in more
    assert sum(c.total_bytes for c in permutes) == trips * 4 * 4 * 4
    assert {c.shift for c in permutes} == {1}
    assert timeline(module, machine("8xH100")).seconds > 0


def test_order_of_partial_permutes_and_collectives_of_all_is_that_of_the_program():
    def branch(first, second):
        return lambda x: second(first(x))

    summed = lambda x: lax.pcast(lax.psum(x, "data"), "data", to="varying")  # noqa: E731
    swapped = lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)])  # noqa: E731

    def local(x):
        return lax.cond(lax.axis_index("data") == 0, branch(summed, swapped), branch(swapped, summed), x)

    with pytest.raises(ProgramError, match=r"device 0 runs all-reduce .* runs permute"):
        costs_of(local)


def test_group_of_one_device_sends_nothing():
    assert not costs(parse(ring_program(lambda x: lax.psum(x, "data"), P(), {"data": 1, "tensor": 8}))).collectives


def test_loop_multiplies_flops_and_collectives_by_its_trips():
    def local(w, x):
        def step(x, w):
            return jnp.tanh(x @ lax.all_gather(w, "data", tiled=True)), None

        return lax.scan(step, x, w)[0]

    program = program_of(
        local, {"w": struct(5, 16, 16), "x": struct(8, 16)}, {"w": P(None, "data"), "x": P("data")}, P("data")
    )
    counted = costs(parse(program))
    assert counted.flops == 5 * 2 * 1 * 16 * 16
    assert counted.products == {"f32 x f32": 5}
    assert [c.count for c in counted.collectives] == [5]


def test_branch_by_device_is_resolved_and_the_busiest_device_counts():
    def local(x):
        return lax.cond(lax.axis_index("data") == 3, lambda x: x @ x @ x, lambda x: x, x)

    assert costs_of(local).flops == 2 * 2 * 4**3


def test_branch_by_a_number_that_passes_a_checkpoint_alongside_data_is_resolved():
    """As in a pipeline's idle tick that is skipped and recomputed: the number and ``x`` pass one barrier."""

    def local(x):
        @jax.checkpoint
        def tick(x, number):
            return lax.cond(number >= lax.axis_index("data"), lambda x: jnp.sin(x @ x), lambda x: x, x)

        def loss(x):
            return jnp.sum(lax.scan(lambda x, number: (tick(x, number), None), x, jnp.arange(3))[0])

        return jax.grad(loss)(x)

    assert costs_of(local).flops == 3 * 4 * 2 * 4**3  # forward, again, and two products backward


def test_collective_that_not_every_device_reaches_is_a_deadlock_with_its_line():
    def local(x):
        def reduced(x):
            return lax.psum(lax.pcast(x, "data", to="varying"), "data")

        return lax.cond(lax.axis_index("data") == 0, reduced, lambda x: x, x)

    program = program_of(local, {"x": struct(8)}, {"x": P()}, P(), locate=locate_here)
    with pytest.raises(ProgramError, match=r"here:\d+: devices would wait .* device 0 runs all-reduce"):
        costs(parse(program))


def test_branch_that_a_whole_group_takes_may_contain_a_collective():
    def local(x):
        def reduced(x):
            return lax.pcast(lax.psum(x, "data"), "data", to="varying")

        return lax.cond(lax.axis_index("tensor") == 0, reduced, lambda x: x, x)

    mesh = {"data": 4, "tensor": 2}
    program = program_of(local, {"x": struct(8, 8)}, {"x": P("data", "tensor")}, P("data", "tensor"), mesh)
    assert [c.axes for c in costs(parse(program)).collectives] == [("data",)]


def test_functions_and_sums_are_counted_by_dtype_in_loops_too():
    def local(x):
        def step(x, _):
            return jnp.exp(x.astype(jnp.bfloat16)).astype(jnp.float32), None

        x, _ = lax.scan(step, x, None, length=3)
        low = lax.reduce(x.astype(jnp.bfloat16), jnp.bfloat16(0), lax.add, (1,))
        table = jnp.zeros((4, 4)).at[jnp.argmax(x, axis=1)].add(x)
        return table * lax.rsqrt(jnp.max(x, keepdims=True)), low.astype(jnp.float32), jnp.tanh(x)

    program = program_of(local, {"x": struct(8, 4)}, {"x": P("data")}, (P("data"), P("data"), P("data")), {"data": 2})
    counted = costs(parse(program))
    assert counted.precise == {"exponential of bf16": 3, "sum of bf16": 1, "sum of f32": 1, "rsqrt of f32": 1}
    assert set(counted.lines) == set(counted.precise)
    first, low = (int(counted.lines[kind].partition(":")[2]) for kind in ("exponential of bf16", "sum of bf16"))
    assert low - first == 3


def branch(x, condition):
    return lax.cond(condition, lambda x: x @ x.T @ x, lambda x: x, x)


@pytest.mark.parametrize(
    ("local", "message"),
    [
        (lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x, x), "which branch runs depends on data"),
        (
            lambda x: lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x + 1, x),
            "how often this loop runs depends on data",
        ),
        (lambda x: branch(x, lax.axis_index("data") / 2 < 1), r"depends on floats \(here:\d+\), which compilers round"),
        (
            lambda x: branch(x, jnp.array([0.5, 2.0] * 4)[lax.axis_index("data")] > 1),
            "depends on floats, which compilers",
        ),
        (lambda x: branch(x, x[0, 0] > lax.axis_index("data") / 2), "depends on data"),
        (
            lambda x: branch(x, lax.axis_index("data") - (2**31 - 1) - 9 < 0),
            r"depends on integers that overflow or divide by zero",
        ),
        (
            lambda x: branch(x, lax.ppermute(lax.axis_index("data"), "data", [(0, 1)]) > 0),
            r"depends on collective_permute in lax\.ppermute \(here:\d+\), whose result is not known in advance",
        ),
        (lambda x: jnp.linalg.cholesky(x), "cannot price|not allowed"),
    ],
)
def test_what_cannot_be_resolved_is_an_error_that_names_the_line(local, message):
    with pytest.raises(ProgramError, match=rf"here:\d+: .*({message})"):
        costs_of(local)


def test_random_bits_are_priced():
    def local(x, key):
        keep = jax.random.bernoulli(jax.random.wrap_key_data(key), 0.9, x.shape)
        return jnp.where(keep, x, 0)

    inputs = {"x": struct(32, 4), "key": jax.ShapeDtypeStruct((2,), jnp.uint32)}
    program = program_of(local, inputs, {"x": P("data"), "key": P()}, P("data"))
    assert costs(parse(program)).elementwise > 20 * 16


def test_work_outside_shard_map_is_refused():
    def function(x):
        return {"out": x + 1}

    program = export(function, {"x": struct(8, 4)}, {"x": P("data")}, mesh={"data": 8}, out_specs={"out": P("data")})
    with pytest.raises(ProgramError, match="is outside shard_map"):
        parse(program)


def test_constant_that_jax_moves_out_of_shard_map_is_followed_inside():
    signs = np.array([1.0, -1.0, 1.0, -1.0], np.float32)
    program = split(lambda x: x * jnp.asarray(signs), 8, 4)
    assert costs(parse(program)).elementwise == 4
    assert memory(parse(program), program).arguments == 16


@pytest.mark.parametrize(
    ("predicate", "known"),
    [
        (lambda i: lax.reduce(6 - 3 * jnp.arange(2) + 0 * i, np.int32(-1), lax.bitwise_and, (0,)) == 2, True),
        (lambda i: jnp.argmax(jnp.arange(4)) + 0 * i == 3, True),
        (lambda i: (i.astype(F32) * 0 + 3e9).astype(jnp.int32) > 0, False),
        (lambda i: lax.div(i * 0 - 7, jnp.int32(2)) == -3, True),
        (lambda i: lax.rem(i * 0 - 7, jnp.int32(2)) == -1, True),
    ],
)
def test_branch_is_the_one_that_runs_or_it_is_refused(predicate, known):
    def local(x):
        return lax.cond(predicate(lax.axis_index("data")), lambda x: x + x @ x, lambda x: x, x)

    program = split(local)
    if not known:
        with pytest.raises(ProgramError, match="which branch runs depends on"):
            costs(parse(program))
        return
    ran = compile_program(program, make_mesh({"data": 8}))({"x": np.ones((32, 4), np.float32)})["out"]
    assert costs(parse(program)).flops == (2 * 4**3 if ran[0, 0] > 1 else 0)


def test_shard_map_that_takes_other_blocks_than_the_signature_is_refused():
    program = program_of(lambda x: x * 2, {"x": struct(8, 8)}, {"x": P()}, P())
    lie = replace(program, inputs=(replace(program.inputs[0], spec=(("data",), ())),))
    with pytest.raises(ProgramError, match=r"input x is sharded as P\(\) and the header has P\('data',\)"):
        parse(lie)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradient_of_a_slice_in_a_loop_adds_to_the_slice_alone(dtype):
    def local(weights, x):
        def loss(weights):
            return lax.scan(lambda x, i: (jnp.tanh(x @ weights[i]), None), x, jnp.arange(4) % 3)[0].sum()

        return jax.grad(loss)(lax.pcast(weights, "data", to="varying"))[None]

    inputs = {"weights": struct(64, 16, 16, dtype=dtype), "x": struct(8, 16, dtype=dtype)}
    counted = costs(parse(program_of(local, inputs, {"weights": P(), "x": P("data")}, P("data"))))
    assert counted.elementwise < 4 * 64 * 16 * 16 / 2


def two(x):
    """Two real arrays combined into one of complex numbers."""
    return lax.complex(x, x + 1)


@pytest.mark.parametrize(
    ("packed", "plain"),
    [
        (lambda x: jnp.real(two(x) * two(x)), lambda x: x * x),
        (lambda x: jnp.real(two(x) / two(x)), lambda x: x / x),
        (lambda x: jnp.real(jnp.exp(two(x))), jnp.exp),
        (lambda x: jnp.real(two(x) + two(x)), lambda x: x + x),
        (lambda x: jnp.real(jnp.sum(two(x), axis=1)), lambda x: jnp.sum(x, axis=1)),
        (lambda x: jnp.real(lax.reduce(two(x), np.complex64(1), lax.mul, (1,))), lambda x: jnp.prod(x, axis=1)),
    ],
)
def test_complex_numbers_cost_at_least_two_real_ones(packed, plain):
    assert costs_of(packed, 64, 64).elementwise >= 2 * costs_of(plain, 64, 64).elementwise


def test_complex_product_costs_four_real_ones_at_their_peak():
    packed = split(lambda x: jnp.real(two(x) @ two(x)), 512, 64)
    assert costs(parse(packed)).flops == 4 * costs_of(lambda x: x @ x, 512, 64).flops
    assert machine("8xH100").peak("complex<f32>") == machine("8xH100").peak("f32")
    assert memory(parse(packed), packed).largest_numbers >= 2 * 64 * 64


def test_operations_are_written_by_kind_where_they_run_at_all():
    def local(x):
        never = lax.fori_loop(0, 0, lambda _, x: jnp.tanh(x), x)
        return lax.fori_loop(0, 3, lambda _, x: jnp.sin(x @ x), never)

    counted = costs_of(local)
    assert counted.written["dot_general"] == counted.written["sine"] == 1 and "tanh" not in counted.written
    assert counted.products == {"f32 x f32": 3}

"""Resident bytes on a device: liveness compared with closed forms, with the CPU compiler, and with published peaks."""

import os
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from course.machines import machine
from course.mesh import make_mesh
from course.program import compile_program, memory, parse, timelines
from course.program.program_test import program_of, struct
from course.validation.single_device import RUNS, single_device

MATRIX = 256 * 256 * 4


def temporaries(local, sizes, specs, out, donate=()):
    program = program_of(local, sizes, specs, out, donate=donate)
    return memory(parse(program), program).temporaries


def test_buffer_that_an_alias_still_reads_is_not_overwritten():
    def local(x):
        whole = lax.all_gather(x, "data", tiled=True)
        alias = lax.optimization_barrier(whole)
        return (whole * 2.0) @ alias

    assert temporaries(local, {"x": struct(64, 64)}, {"x": P("data")}, P("data")) >= 2 * 64 * 64 * 4


def test_what_a_branch_returns_lives_while_the_branch_runs():
    def work(x):
        return jnp.sum(x @ x) * x @ x

    def plain(x):
        return work(lax.all_gather(x, "data", tiled=True))[:8]

    def branched(x):
        whole = lax.all_gather(x, "data", tiled=True)
        return lax.cond(lax.axis_index("tensor") == 0, work, work, whole)[:8]

    mesh = {"data": 4, "tensor": 2}
    temporary_bytes = []
    for local in (plain, branched):
        program = program_of(local, {"x": struct(64, 64)}, {"x": P("data")}, P(("data", "tensor")), mesh)
        temporary_bytes.append(memory(parse(program), program).temporaries)
    assert temporary_bytes[1] >= temporary_bytes[0]


def test_a_chain_of_views_may_be_long():
    def local(x):
        views = x * 2.0
        for _ in range(1200):
            views = views[:, None][:, 0]
        return views

    assert temporaries(local, {"x": struct(64, 64)}, {"x": P("data")}, P("data")) == 0


@pytest.mark.parametrize("read_again", [True, False])
@pytest.mark.parametrize("view", [lambda y: y, lambda y: y.reshape(-1).reshape(256, 256), lambda y: 2 * y])
def test_a_branch_overwrites_only_what_nothing_reads_after_it(read_again, view):
    def local(branched, x):
        def first(y):
            return jnp.exp(view(y)) @ x[:, :8]

        whole = x @ x
        begun = lax.cond(lax.axis_index("data") == 0, first, lambda y: y[:, :8], whole) if branched else first(whole)
        return begun + (jnp.sin(whole) @ x[:, :8] if read_again else 0)

    plain, branched = (
        temporaries(partial(local, branched), {"x": struct(256, 256)}, {"x": P()}, P("data"))
        for branched in (False, True)
    )
    assert plain >= (1 + read_again) * MATRIX
    assert branched >= plain


def test_arguments_outputs_and_donation_are_counted_per_device():
    program = program_of(lambda x: x * 2, {"x": struct(8, 256)}, {"x": P("data")}, P("data"), donate=("x",))
    resident = memory(parse(program), program)
    assert (resident.arguments, resident.outputs, resident.aliased, resident.temporaries) == (1024, 1024, 1024, 0)
    assert resident.peak == 1024


def test_gathered_array_lives_until_its_last_use():
    def local(w, x):
        for _ in range(3):
            x = x @ lax.all_gather(w, "data", tiled=True)
        return x

    sizes = {"w": struct(256, 256), "x": struct(8, 256)}
    program = program_of(local, sizes, {"w": P("data"), "x": P("data")}, P("data"))
    resident = memory(parse(program), program)
    assert 256 * 256 * 4 <= resident.temporaries <= 2 * 256 * 256 * 4
    assert resident.alive[0].kind == "all_gather"


@pytest.mark.parametrize("reshaped", [False, True])
def test_a_sum_that_many_kernels_read_is_written_once_and_not_added_up_again(reshaped):
    def local(x, w):
        for _ in range(8):
            x = x + lax.optimization_barrier(x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))) @ w
            x = x.reshape(2, 128, 256).reshape(256, 256) if reshaped else x
        return x @ w

    sizes = {"x": struct(256, 256), "w": struct(256, 256)}
    resident_bytes = temporaries(local, sizes, {"x": P(), "w": P()}, P())
    assert resident_bytes < 6 * MATRIX, "not what each of the eight layers adds"


def test_elementwise_chain_needs_one_buffer_at_most():
    program = program_of(lambda x: jnp.tanh(jnp.sin(x) * 2 + 1) - 3, {"x": struct(8, 256)}, {"x": P("data")}, P("data"))
    assert memory(parse(program), program).temporaries == 0


@pytest.mark.parametrize(("remat", "copies"), [(True, 1), (False, 6)])
def test_scan_keeps_what_the_backward_pass_needs(remat, copies):
    def loss(w, x):
        def step(x, w):
            return jnp.tanh(x @ lax.all_gather(w, "data", tiled=True)), None

        return jnp.sum(lax.scan(jax.checkpoint(step) if remat else step, x, w)[0])

    sizes = {"w": struct(6, 128, 128), "x": struct(8, 128)}
    program = program_of(jax.grad(loss), sizes, {"w": P(None, "data"), "x": P("data")}, P(None, "data"))
    whole = 128 * 128 * 4
    temporary_bytes = memory(parse(program), program).temporaries
    assert copies * whole <= temporary_bytes <= (copies + 2.5) * whole
    compiled = compile_program(program, make_mesh({"data": 8})).call.memory_analysis()
    assert temporary_bytes == pytest.approx(compiled.temp_size_in_bytes, rel=0.35)  # type: ignore[union-attr]


# Write locations of results


def scanned(body):
    return lambda p, x: lax.scan(body, p, x)[0]


def accumulated(p, x):
    return p - scanned(lambda total, x: (total + jnp.sin(x @ x), None))(jnp.zeros_like(p), x)


def updated(p):
    return lax.fori_loop(0, 4, lambda i, p: p.at[i].set(p[i] - jnp.sin(p[i] @ p[i])), p)


def stacked(p):
    return lax.scan(lambda _, p: (None, p - jnp.sin(p @ p)), None, p)[1]


ONE, STACK, HIGH = (256, 256), (4, 256, 256), (512, 256)
WRITTEN = {
    "accumulated gradients live alongside the donated state": (accumulated, (ONE, STACK), True, 2),
    "a loop's carry is in the donated input that it starts from": (
        scanned(lambda p, x: (p + jnp.sin(x @ x), None)),
        (ONE, STACK),
        True,
        1,
    ),
    "an update in a loop writes into the donated stack": (updated, (STACK,), True, 1),
    "a carry is not overwritten by a matmul that reads it": (
        scanned(lambda x, w: (jnp.sin(x) @ w, None)),
        (ONE, STACK),
        False,
        1,
    ),
    "a matmul cannot write over the donated input that it reads": (lambda p: jnp.sin(p @ p) @ p, (ONE,), True, 2),
    "a matmul's result may take the place of what was read before": (lambda p: jnp.sin(p @ p), (ONE,), True, 1),
    "elementwise work is done in place": (lambda p: jnp.sin(p) + 1, (ONE,), True, 0),
    "a matmul reads a transpose in place": (lambda p: p.T @ p, (HIGH,), False, 0),
    "a matmul reads consecutive slices in place": (lambda p: p[:256] @ p[256:].T, (HIGH,), False, 0),
    "a matmul cannot read every other row": (lambda p: p[::2] @ p[1::2], (HIGH,), False, 2),
    "an all-reduce writes over its operand": (lambda p: lax.psum(p @ p, "data"), (ONE,), False, 0),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_where_results_are_written(case):
    """Every device has all of it, so bytes are easy to count."""
    local, shapes, donated, matrices = WRITTEN[case]
    sizes = {name: struct(*shape) for name, shape in zip("px", shapes, strict=False)}
    temporary_bytes = temporaries(local, sizes, dict.fromkeys(sizes, P()), P(), donate=("p",) if donated else ())
    assert temporary_bytes == pytest.approx(matrices * MATRIX, abs=64)


def test_stack_that_a_loop_builds_from_a_donated_one_needs_a_buffer_until_the_end():
    assert temporaries(stacked, {"p": struct(*STACK)}, {"p": P()}, P(), donate=("p",)) >= 5 * MATRIX


# As published


def test_peaks_are_within_ten_percent_of_those_published_for_one_a5000():
    errors = {}
    for run in RUNS if os.environ.get("MESHCRAFT_FULL") else RUNS[::4]:
        program = single_device(run)
        errors[run.name] = abs(memory(parse(program), program).peak / run.peak - 1)
    assert max(errors.values()) < 0.10, errors
    assert sum(errors.values()) / len(errors) < 0.05, errors


def test_gathers_issued_early_are_resident_early():
    """Sequential gathers keep one whole weight in memory, and gathers that all begin at once keep all of them."""

    def local(w, x):
        for part in w:
            x = jnp.tanh(x @ lax.all_gather(part, "data", tiled=True))
        return x

    sizes, specs = {"w": struct(4, 64, 64), "x": struct(8, 64)}, {"w": P(None, "data"), "x": P("data")}
    program = program_of(local, sizes, specs, P("data"))
    module, whole = parse(program), 64 * 64 * 4
    assert whole <= memory(module, program).temporaries < 2 * whole
    assert 4 * whole <= memory(module, program, early=True).temporaries < 5 * whole
    orders = {step.early: step.seconds for step in timelines(module, machine("8xH100"))}
    assert orders[True] <= orders[False]

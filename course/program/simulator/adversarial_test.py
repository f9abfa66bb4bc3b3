"""Programs that would fool a naive simulator, one test each: they are refused, or they are priced."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from course.machines import machine
from course.program import ProgramError, costs, memory, parse, timeline
from course.program.program_test import program_of, struct

H100 = machine("8xH100")
WIDTH = 2048
INPUTS, SPECS = {"x": struct(8 * WIDTH, WIDTH, dtype=jnp.bfloat16)}, {"x": P("data")}
PRODUCT = 2 * WIDTH**3


def program(local, inputs=INPUTS, **options):
    return program_of(local, inputs, SPECS, P("data"), locate={__file__: "here"}.get, **options)


def seconds(local, **options):
    return timeline(parse(program(local, **options)), H100).seconds


def test_a_matmul_written_as_multiply_and_sum_is_dearer_than_the_matmul():
    def written_out(x):
        def add(total, row):
            return total + row[0][:, None] * row[1][None, :], None

        return lax.scan(add, jnp.zeros_like(x), (x.T, x))[0]

    def at_once(x):
        return jnp.sum(x[:, :, None] * x[None, :, :], axis=1)

    plain = seconds(lambda x: x @ x)
    assert costs(parse(program(at_once))).elementwise > PRODUCT / 2
    assert seconds(written_out) > 10 * plain
    assert seconds(at_once) > 10 * plain


def test_dead_code_takes_no_time_and_no_memory():
    def scan_of(trip):
        return lambda x: lax.scan(trip, (x, x), None, length=3)[0][0]

    wasted = scan_of(lambda carry, _: ((carry[0] + 1, carry[1] @ carry[1]), None))
    needed = scan_of(lambda carry, _: ((carry[0] + 1, carry[1]), None))
    plain, wasteful = program(needed), program(wasted)
    assert timeline(parse(wasteful), H100).seconds == timeline(parse(plain), H100).seconds
    assert memory(parse(wasteful), wasteful).temporaries == memory(parse(plain), plain).temporaries


def test_a_permute_that_nobody_waits_for_is_waited_for_at_the_end():
    def local(x):
        return x @ x, lax.ppermute(x, "data", [(i, (i + 1) % 8) for i in range(8)])

    alone = seconds(lambda x: local(x)[1])
    result = timeline(parse(program(lambda x: jnp.stack(local(x)))), H100)
    assert result.seconds > alone
    many = seconds(lambda x: [x := local(x)[1] for _ in range(5)][-1])
    assert many == pytest.approx(5 * alone)


def test_eight_bit_floats_are_seen_and_priced_at_their_own_peak():
    def local(x):
        low = x.astype(jnp.float8_e4m3fn)
        return lax.dot(low, low, preferred_element_type=jnp.float32).astype(jnp.bfloat16)

    assert costs(parse(program(local))).products == {"f8E4M3FN x f8E4M3FN": 1}
    bars = {b.kind: b for b in timeline(parse(program(local)), H100).bars}
    assert bars["dot_general"].end - bars["dot_general"].start == pytest.approx(PRODUCT / H100.peak("f8"))
    on_a100 = {b.kind: b for b in timeline(parse(program(local)), machine("8xA100")).bars}
    taken = on_a100["dot_general"].end - on_a100["dot_general"].start
    assert taken == pytest.approx(PRODUCT / machine("8xA100").peak("bf16"))


def test_a_branch_on_the_platform_is_the_side_of_that_platform():
    def local(x):
        return lax.platform_dependent(x, cpu=lambda x: x + 1, cuda=lambda x: x @ x)

    assert costs(parse(program(local))).flops == 0
    assert costs(parse(program(local, platform="cuda"))).flops == PRODUCT


def test_a_collective_that_only_the_less_busy_devices_run_is_counted():
    def local(x):
        sent = lax.ppermute(x, "data", [(i, i + 1) for i in range(1, 7)])
        return lax.cond(lax.axis_index("data") == 0, jnp.tanh, lambda x: x, x) + sent

    (collective,) = costs(parse(program(local))).collectives
    assert (collective.kind, collective.wire_bytes) == ("collective_permute", 2 * WIDTH**2)


def test_a_dim_of_size_one_costs_nothing_however_it_is_added():
    def with_dim(add):
        def local(x):
            parts = [add(x @ x), add(x.T @ x)]
            return jnp.concatenate(parts).sum(0)

        return seconds(local)

    by_broadcast, by_reshape = with_dim(lambda x: x[None]), with_dim(lambda x: lax.reshape(x, (1, *x.shape)))
    assert by_broadcast == pytest.approx(by_reshape, rel=1e-9)


def test_loop_carries_that_start_as_views_of_one_buffer_are_buffers_of_their_own():
    def local(x):
        start = x * 2
        views = tuple(start.reshape(WIDTH * 2**k, WIDTH // 2**k) for k in range(4))
        end = lax.scan(
            lambda c, i: (tuple(v + (i + k).astype(v.dtype) for k, v in enumerate(c)), None), views, jnp.arange(4)
        )[0]
        return sum(v.reshape(x.shape) @ x for v in end)

    resident = memory(parse(program(local)), program(local))
    assert resident.temporaries >= 4 * 2 * WIDTH**2


def test_what_a_fused_chain_computes_is_charged_once_however_many_paths_lead_to_it():
    def chain(levels):
        def local(x):
            for _ in range(levels):
                x = x * x + x
            return x

        return local

    machine_of_arithmetic = replace(H100, vector_flops=1.0)
    times = [timeline(parse(program(chain(n))), machine_of_arithmetic).seconds for n in (5, 10)]
    assert times[1] == pytest.approx(2 * times[0])


def test_arithmetic_inside_a_reduction_is_charged():
    def reduction(work):
        def body(a, b):
            for _ in range(work):
                b = b * 1.5
            return a + b

        return lambda x: x + lax.reduce(x, np.array(0, x.dtype), body, (0,))

    def window(size):
        return lambda x: lax.reduce_window(x, np.array(0, x.dtype), lax.add, (size, size), (1, 1), "SAME")

    machine_of_arithmetic = replace(H100, vector_flops=1.0)
    for cheap, dear, ratio in ((reduction(2), reduction(200), 50), (window(2), window(20), 100)):
        few, many = (timeline(parse(program(f)), machine_of_arithmetic).seconds for f in (cheap, dear))
        assert many > 0.9 * ratio * few


def test_what_a_loop_hands_on_in_another_place_is_copied():
    def looped(order):
        return lambda x: lax.fori_loop(0, 8, lambda _, c: c[::order], (x, x + 1))[0]

    copied = 8 * 2 * 2 * 2 * WIDTH**2 / H100.memory_bandwidth
    assert seconds(looped(-1)) - seconds(looped(1)) > 0.9 * copied


def test_counters_that_take_forever_to_follow_are_refused():
    def local(x):
        return lax.while_loop(lambda c: c[0] < 10**7, lambda c: (c[0] + 1, c[1] + 1), (0, x))[1]

    with pytest.raises(ProgramError, match=r"here:\d+: .*(too long|times)"):
        costs(parse(program(local)))

"""What would fool a naive simulator, one test each: it is refused, or it is priced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from course.machines import machine
from course.program import ProgramError, costs, difference, memory, parse, timeline
from course.program.program_test import program_of, struct

H100 = machine("8xH100")
WIDTH = 2048
INPUTS, SPECS = {"x": struct(8 * WIDTH, WIDTH, dtype=jnp.bfloat16)}, {"x": P("data")}
PRODUCT = 2 * WIDTH**3


def program(local, inputs=INPUTS, **options):
    return program_of(local, inputs, SPECS, P("data"), locate=lambda f: "here" if f == __file__ else None, **options)


def seconds(local, **options):
    return timeline(parse(program(local, **options)), H100).seconds


def test_a_matmul_written_as_multiply_and_sum_is_dearer_than_the_matmul():
    def written_out(x):
        return lax.scan(lambda total, row: (total + row[0][:, None] * row[1][None, :], None),
                        jnp.zeros_like(x), (x.T, x))[0]  # fmt: skip

    def at_once(x):
        return jnp.sum(x[:, :, None] * x[None, :, :], axis=1)

    plain = seconds(lambda x: x @ x)
    assert costs(parse(program(at_once))).elementwise > PRODUCT / 2
    assert seconds(written_out) > 10 * plain
    assert seconds(at_once) > 10 * plain


@pytest.mark.parametrize(
    ("local", "message"),
    [
        (lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x, x), "which branch runs depends on data"),
        (lambda x: lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ x, x), "how often this loop runs depends"),
    ],
)
def test_a_branch_or_a_loop_that_depends_on_data_is_refused_at_its_line(local, message):
    with pytest.raises(ProgramError, match=rf"here:\d+: .*{message}"):
        seconds(local)


def test_a_callback_is_refused():
    def local(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with pytest.raises(ProgramError, match="calls back into Python"):
        seconds(local)


def test_dead_code_takes_no_time_and_no_memory():
    def scan_of(trip):
        return lambda x: lax.scan(trip, (x, x), None, length=3)[0][0]

    wasted = scan_of(lambda carry, _: ((carry[0] + 1, carry[1] @ carry[1]), None))
    needed = scan_of(lambda carry, _: ((carry[0] + 1, carry[1]), None))
    plain, wasteful = program(needed), program(wasted)
    assert timeline(parse(wasteful), H100).seconds == timeline(parse(plain), H100).seconds
    assert memory(parse(wasteful), wasteful).temporaries == memory(parse(plain), plain).temporaries


def test_a_result_computed_beforehand_as_a_giant_constant_is_refused():
    table = np.random.default_rng(0).standard_normal((1024, WIDTH)).astype(np.float32)
    with pytest.raises(ProgramError, match=r"constant of 8,388,608 bytes"):
        seconds(lambda x: x[:1024] + jnp.asarray(table, jnp.float32).astype(jnp.bfloat16))


def test_a_permute_that_nobody_waits_for_is_waited_for_at_the_end():
    def local(x):
        return x @ x, lax.ppermute(x, "data", [(i, (i + 1) % 8) for i in range(8)])

    alone = seconds(lambda x: local(x)[1])
    both = timeline(parse(program(lambda x: jnp.stack(local(x)))), H100)
    assert both.seconds > alone
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


def test_a_program_that_does_less_at_larger_sizes_is_seen():
    def local(x):
        return x @ x @ x if x.shape[0] < 1024 else x @ x

    small = program(local, inputs={"x": struct(64, 8, dtype=jnp.bfloat16)})
    assert "dot_general at here:" in difference(parse(small), parse(program(local)))


def test_a_branch_on_the_platform_holds_what_the_platform_gets():
    def local(x):
        return lax.platform_dependent(x, cpu=lambda x: x + 1, cuda=lambda x: x @ x)

    assert costs(parse(program(local))).flops == 0
    assert costs(parse(program(local, platform="cuda"))).flops == PRODUCT

"""The contract of ``context_parallel``: the derivative of the ring, its memory, and the order's balance."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from autograder.chapters.context_parallel import CONTRACT
from autograder.chapters.context_parallel.tasks import attention, in_sequence, mean_work, on_devices, order_of
from autograder.chapters.context_parallel.wrapping import checked_order
from autograder.contract.wrapping import Mismatch
from autograder.proof.central_differences import places
from course.attention import KEYS_AT_ONCE, attend_chunks, attend_chunks_backward
from course.mesh import abstract_mesh, make_mesh
from course.program import export, memory, parse
from solutions.context_parallel import merge_attention, ring_attention, zigzag_order

TASKS = {task.name: task for task in CONTRACT.tasks}


@pytest.mark.parametrize("order", places(((0,), (1,), (2,)), ((0, 5), (1, 4), (2, 3)), ((2,), (0,), (1,)), least=2))
def test_the_derivative_of_the_ring_equals_central_differences_with_masked_blocks(order):
    rng, spec = np.random.default_rng(0), P(None, "context")
    q, upstream = (rng.standard_normal((1, 6, 4, 3)).astype(np.float32) for _ in range(2))
    k, v = (rng.standard_normal((1, 6, 2, 3)).astype(np.float32) for _ in range(2))
    ring = partial(ring_attention, order=order, axis_name="context")
    attend = jax.jit(jax.shard_map(ring, mesh=make_mesh({"context": 3}), in_specs=spec, out_specs=spec))
    _, back = jax.vjp(attend, q, k, v)
    for argument, gradient in enumerate(back(jnp.asarray(upstream))):
        for index in ((0, 0, 0, 0), (0, 2, 1, 2), (0, 5, 0, 1)):
            shifted = [np.array([q, k, v][argument]) for _ in range(2)]
            shifted[0][index] += 1e-2
            shifted[1][index] -= 1e-2
            high, low = (
                np.sum(np.float64(attend(*[array if i == argument else x for i, x in enumerate((q, k, v))])) * upstream)
                for array in shifted
            )
            assert float(gradient[index]) == pytest.approx((high - low) / 2e-2, rel=2e-2, abs=2e-3)


def test_pieces_of_a_chunk_and_chunks_that_nobody_sees_make_the_same_attention(monkeypatch):
    monkeypatch.setattr("course.attention.KEYS_AT_ONCE", 2)
    rng, order = np.random.default_rng(0), jnp.arange(3)
    q, upstream = (jnp.float32(rng.standard_normal((2, 12, 4, 3))) for _ in range(2))
    k, v = (jnp.float32(rng.standard_normal((2, 12, 2, 3))) for _ in range(2))
    out, lse = attend_chunks(q, k, v, order, order)
    expected, back = jax.vjp(attention, q, k, v)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6)
    gradients = attend_chunks_backward(q, k, v, out, lse, upstream, order, order)
    for gradient, reference in zip(gradients, back(upstream), strict=True):
        np.testing.assert_allclose(gradient, reference, rtol=0, atol=5e-6)
    nothing = attend_chunks(q, k, v, order, order + 3)
    assert not np.any(nothing[0]) and np.all(np.isneginf(nothing[1]))
    same = merge_attention((out, lse), nothing)
    np.testing.assert_array_equal(same[0], out)
    np.testing.assert_allclose(same[1], lse, rtol=1e-6)


def test_live_memory_of_the_ring_grows_with_the_tokens_of_a_device():
    temporaries = []
    for tokens in (8192, 16_384, 32_768):
        q, k = (jax.ShapeDtypeStruct((1, tokens, heads, 64), np.float32) for heads in (8, 4))
        spec, order = P(None, "context"), zigzag_order(8)

        def local(q, k, v, upstream, order=order):
            out, back = jax.vjp(partial(ring_attention, order=order, axis_name="context"), q, k, v)
            return {"out": out, "gradients": back(upstream)}

        results = {"out": spec, "gradients": spec}
        mapped = jax.shard_map(local, mesh=abstract_mesh({"context": 8}), in_specs=spec, out_specs=results)
        inputs = {"q": q, "k": k, "v": k, "upstream": q}
        program = export(
            lambda mapped=mapped, **arrays: mapped(*arrays.values()),
            inputs,
            dict.fromkeys(inputs, spec),
            mesh={"context": 8},
            out_specs=results,
        )
        usage = memory(parse(program), program)
        assert usage.largest_numbers <= 8 * (tokens // 8) * KEYS_AT_ONCE < 8 * tokens**2 // 8
        temporaries.append(usage.temporaries)
    assert temporaries[2] < 2.1 * temporaries[1]


def test_tokens_are_put_in_the_order_of_devices_and_back():
    for case in TASKS["ring_attention"].cases:
        tokens = np.arange(24 * len(np.ravel(order_of(case))))[None]
        np.testing.assert_array_equal(in_sequence(on_devices(tokens, case, 1), case, 1), tokens)


def test_chunks_can_have_any_integers_as_numbers_and_nothing_else():
    assert checked_order(((np.int32(0), 3), [1, np.int64(2)]), 2) == ((0, 3), (1, 2))
    for number in (0.0, True, "0", None):
        with pytest.raises(Mismatch, match="as the number of a chunk, expected an integer"):
            checked_order(((number, 3), (1, 2)), 2)


def test_the_mean_of_the_work_is_that_of_all_pairs():
    for case in TASKS["zigzag_order"].cases:
        n = case.mesh["context"]
        pairs = sum(chunk + 1 for chunk in range(2 * n))
        assert mean_work(case) * n == pairs * 4 * case.sizes.length**2 * case.sizes.width

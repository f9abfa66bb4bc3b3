"""Wrong answers for ``context_parallel``: mistakes that people make, and the facts that they fail."""

from __future__ import annotations

import inspect
from functools import partial
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autograder.chapters.mutant import NUMBERS, WRONG, gathered_and_scattered, mutant, patch, there_and_back
from course import attention
from course.attention import attend_chunks, attend_chunks_backward
from course.mesh import vary_alike
from solutions.context_parallel import cp_transformer_step, merge_attention, ring_attention, zigzag_order


def gathers_keys_and_values(q, k, v, order, axis_name):
    """The naive baseline, as in Llama 3: every device gets all keys and values, and skips what is masked."""

    def gather(x):
        return lax.all_gather(x, axis_name, axis=1, tiled=True)

    def chunk_numbers():
        return jnp.array(order)[lax.axis_index(axis_name)], jnp.array(order).reshape(-1)

    def forward(q, k, v):
        out, lse = attend_chunks(q, gather(k), gather(v), *chunk_numbers())
        return out, (q, k, v, out, lse)

    def backward(saved, upstream):
        q, k, v, out, lse = saved
        of_q, *of_kv = attend_chunks_backward(q, gather(k), gather(v), out, lse, upstream, *chunk_numbers())
        return of_q, *(lax.psum_scatter(x, axis_name, scatter_dimension=1, tiled=True) for x in of_kv)

    attend: Any = jax.custom_vjp(lambda q, k, v: forward(q, k, v)[0])
    attend.defvjp(forward, backward)
    return attend(*vary_alike(q, k, v))


def saves_every_block(q, k, v, order, axis_name):
    """A ring with a derivative that keeps what the forward pass has received, and sends only gradients."""
    size = lax.axis_size(axis_name)
    to_next = [(i, (i + 1) % size) for i in range(size)]

    def chunks_of(step):
        return jnp.array(order)[(lax.axis_index(axis_name) - step) % size]

    def send(arrays):
        return jax.tree.map(lambda x: lax.ppermute(x, axis_name, to_next), arrays)

    def forward(q, k, v):
        def pass_on(carry, step):
            merged, block = carry
            coming = send(block)
            merged = merge_attention(merged, attend_chunks(q, block[0], block[1], chunks_of(0), chunks_of(step)))
            return (merged, coming), block

        nothing: Any = vary_alike(jnp.zeros_like(q), jnp.full(q.shape[:-1], -jnp.inf), q)[:2]
        (merged, last), blocks = lax.scan(pass_on, (nothing, (k, v)), jnp.arange(size - 1))
        out, lse = merge_attention(merged, attend_chunks(q, last[0], last[1], chunks_of(0), chunks_of(size - 1)))
        return out, (q, jax.tree.map(lambda stacked, x: jnp.concatenate([stacked, x[None]]), blocks, last), out, lse)

    def backward(saved, upstream):
        q, blocks, out, lse = saved

        def own(block, step):
            of_q, *of_kv = attend_chunks_backward(
                q, block[0], block[1], out, lse, upstream, chunks_of(0), chunks_of(step)
            )
            return of_q, tuple(of_kv)

        def pass_on(carry, numbered):
            (of_q, of_kv), (step, block) = carry, numbered
            arriving, (own_q, own_kv) = send(of_kv), own(block, step)
            return (of_q + own_q, jax.tree.map(jnp.add, arriving, own_kv)), None

        first, later = (jax.tree.map(lambda x, part=part: x[part], blocks) for part in (0, slice(1, None)))
        (of_q, of_kv), _ = lax.scan(pass_on, own(first, 0), (jnp.arange(1, size), later))
        return of_q, *send(of_kv)

    attend: Any = jax.custom_vjp(lambda q, k, v: forward(q, k, v)[0])
    attend.defvjp(forward, backward)
    return attend(*vary_alike(q, k, v))


def _without_skipping():
    """The functions of ``course.attention`` when every pair of chunks is computed and masked."""
    source, space = inspect.getsource(attention), {}
    skipping = "lax.cond(start < first + q.shape[3], "
    assert source.count(skipping) == 2
    exec(compile(source.replace(skipping, "lax.cond(start >= 0, "), "<computes every pair>", "exec"), space)
    return {name: space[name] for name in ("attend_chunks", "attend_chunks_backward")}


skips_no_pair_of_chunks = FunctionType(
    ring_attention.__code__, {**ring_attention.__globals__, **_without_skipping()}, "skips_no_pair_of_chunks"
)


def contiguous_order(num_devices):
    """The naive baseline: tokens as they come."""
    return tuple((2 * device, 2 * device + 1) for device in range(num_devices))


def interleaved_order(num_devices):
    return tuple((device, device + num_devices) for device in range(num_devices))


def zigzag_of_eight(num_devices):
    return tuple((device % (2 * num_devices), (15 - device) % (2 * num_devices)) for device in range(num_devices))


HELD, LATE, TIME = "live temporaries", "exposed communication", "predicted time"
SENT, OTHERS, REDUCED = "permute bytes", "other collectives", "all-reduce bytes"
merge, ring = partial(patch, merge_attention), partial(patch, ring_attention)
zigzag, step = partial(patch, zigzag_order), partial(patch, cp_transformer_step)
LARGEST = "largest = jnp.where(largest == -jnp.inf, 0, largest)"
HOPS = "lax.ppermute(x, axis_name, to_next)"
IN_BFLOAT16 = "lax.ppermute(x.astype(jnp.bfloat16), axis_name, to_next).astype(x.dtype)"

MUTANTS = (
    merge("returns_the_larger_log_sum_exp", {"largest + jnp.log(total)": "largest"}, *WRONG),
    merge("forgets_to_divide", {" / total[..., None]": ""}, *WRONG),
    merge("forgets_queries_without_keys", {LARGEST: "largest = largest"}, *WRONG),
    merge(
        "exponentials_overflow",
        {LARGEST: "largest = jnp.zeros_like(largest)"},
        *WRONG,
        shown_by=("scores near 10,000",),
    ),
    merge(
        "subtracts_the_first_log_sum_exp",
        {"jnp.maximum(lse_a, lse_b)": "jnp.where(lse_a == -jnp.inf, lse_b, lse_a)"},
        *WRONG,
        shown_by=("scores near 10,000",),
    ),
    merge(
        "has_no_gradient_of_the_weights",
        {"seen = a + b > 0": "a, b = lax.stop_gradient((a, b))\n    seen = a + b > 0"},
        "gradients",
    ),
    mutant("ring_attention", gathers_keys_and_values, SENT, OTHERS, HELD, LATE),
    mutant("ring_attention", saves_every_block, SENT, HELD),
    ring("sends_to_the_wrong_side", {"(i, (i + 1) % size)": "(i, (i - 1) % size)"}, *WRONG),
    ring("leaves_gradients_one_device_early", {"return of_q, *send(of_kv)": "return of_q, *of_kv"}, "gradients"),
    ring("sends_in_bfloat16", {HOPS: IN_BFLOAT16}, *WRONG, SENT, LATE),
    ring(
        "sends_sums_after_adding",
        {
            "coming, arriving = send(travelling), send(of_kv)": "coming = send(travelling)",
            "jax.tree.map(jnp.add, arriving, own_kv)": "send(jax.tree.map(jnp.add, of_kv, own_kv))",
            "send((k, v)), of_kv)": "send((k, v)), send(of_kv))",
            "return of_q, *send(of_kv)": "return of_q, *of_kv",
        },
        LATE,
    ),
    ring(
        "knows_of_two_chunks",
        {"jnp.array(order)[": "jnp.array([chunks[:1] + chunks[1:][-1:] for chunks in order])["},
        *WRONG,
        shown_by=("model=2 x ring=4, in any order, large scores",),
    ),
    mutant("ring_attention", skips_no_pair_of_chunks, TIME),
    ring(
        "exponentials_of_scores_overflow",
        {LARGEST: "largest = jnp.zeros_like(largest)"},
        *WRONG,
        inside=merge_attention,
        shown_by=("model=2 x ring=4, in any order, large scores",),
    ),
    mutant("zigzag_order", contiguous_order, "most loaded device", TIME),
    mutant("zigzag_order", interleaved_order, "most loaded device", TIME, shown_by=("context=8",)),
    mutant("zigzag_order", zigzag_of_eight, "values", shown_by=("context=3",)),
    zigzag(
        "mirrors_within_a_half",
        {"2 * num_devices - 1 - device)": "num_devices + device)"},
        "most loaded device",
        TIME,
        shown_by=("context=8",),
    ),
    zigzag("gives_a_chunk_twice", {"2 * num_devices - 1 - device)": "2 * num_devices - 2 - device)"}, "values"),
    step(
        "numbers_positions_on_each_device", {'["position"][places]': '["position"][jnp.arange(len(places))]'}, *NUMBERS
    ),
    step(
        "averages_means_of_devices",
        {"* own / total": "/ (lax.axis_size(data_axis) * lax.axis_size(context_axis))"},
        *NUMBERS,
    ),
    step(
        "forgets_the_context_axis",
        {"lambda share: lax.psum(share, axes)": "lambda share: lax.psum(share, data_axis)"},
        *NUMBERS,
        REDUCED,
    ),
    step(
        "drops_the_same_in_every_chunk",
        {"(chunks)\n        attend": "(0 * chunks)\n        attend"},
        *NUMBERS,
        shown_by=("data=2 x context=2, dropout",),
    ),
    step(
        "reduces_axis_by_axis",
        {"lax.psum(share, axes)": "lax.psum(lax.psum(share, context_axis), data_axis)"},
        REDUCED,
        shown_by=("data=2 x context=2, dropout",),
    ),
    step("keeps_every_activation", {"@jax.checkpoint\n    ": ""}, HELD),
    step(
        "reports_its_own_loss",
        {"learning_rate * g, params, gradients), loss": "learning_rate * g, params, gradients), shares[0]"},
        "values",
    ),
    step(
        "sends_activations_to_a_neighbour_and_back",
        {
            "return layer_with(attend, weights, x,": (
                f"x = {there_and_back('x', 'context_axis')}\n        return layer_with(attend, weights, x,"
            )
        },
        SENT,
    ),
    step(
        "sends_activations_round",
        {
            "return layer_with(attend, weights, x,": (
                f"x = {gathered_and_scattered('x', 'context_axis')}\n        return layer_with(attend, weights, x,"
            )
        },
        OTHERS,
    ),
)

"""Wrong answers for ``sequence_parallel``: mistakes that people make, and the facts that they fail."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from autograder.chapters.mutant import GRADIENTS, NUMBERS, Mutant, gathered_and_scattered, mutant, patch, there_and_back
from course.mesh import as_varying
from course.model import drop, rms_norm
from solutions.data_parallel import fold_key_over_axes
from solutions.sequence_parallel import (
    attend,
    attend_in_chunks,
    enter_tensor_region,
    leave_tensor_region,
    selective_recompute,
    sp_block,
    ulysses_attention,
)


def own_tokens(whole, axis_name):
    """This device's tokens of ``[batch, seq, width]``."""
    length = whole.shape[1] // lax.axis_size(axis_name)
    return lax.dynamic_slice_in_dim(whole, lax.axis_index(axis_name) * length, length, 1)


def in_place(x, axis_name):
    """This device's tokens, and zeros in place of all others."""
    whole = jnp.concatenate([x * 0] * lax.axis_size(axis_name), axis=1)
    return lax.dynamic_update_slice_in_dim(whole, x, lax.axis_index(axis_name) * x.shape[1], 1)


def with_derivative(forward, backward):
    """A function of one array with a custom derivative."""
    wrapped = jax.custom_vjp(forward)
    wrapped.defvjp(lambda x: (forward(x), None), lambda _, g: (backward(g),))
    return wrapped


def gathered(x, axis_name):
    return lax.all_gather(x, axis_name, axis=1, tiled=True)


def scattered(x, axis_name):
    return lax.psum_scatter(x, axis_name, scatter_dimension=1, tiled=True)


def sums_what_it_places(x, axis_name, split):
    return lax.psum(in_place(x, axis_name), axis_name) if split else enter_tensor_region(x, axis_name, split)


def takes_its_own_share_of_the_gradient(x, axis_name, split):
    if not split:
        return enter_tensor_region(x, axis_name, split)
    return with_derivative(lambda x: gathered(x, axis_name), lambda g: own_tokens(g, axis_name))(x)


def sums_the_gradient_and_takes_its_part(x, axis_name, split):
    if not split:
        return enter_tensor_region(x, axis_name, split)

    def back(g):
        return own_tokens(as_varying(lax.psum(g, axis_name), axis_name), axis_name)

    return with_derivative(lambda x: gathered(x, axis_name), back)(x)


def interleaves_the_tokens(x, axis_name, split):
    if not split:
        return enter_tensor_region(x, axis_name, split)
    parts = lax.all_gather(x, axis_name, axis=2)
    return parts.reshape(x.shape[0], -1, x.shape[2])


def sums_and_keeps_its_tokens(x, axis_name, split):
    return own_tokens(lax.psum(x, axis_name), axis_name) if split else lax.psum(x, axis_name)


def gives_back_its_own_tokens_gradient(x, axis_name, split):
    if not split:
        return lax.psum(x, axis_name)
    return with_derivative(lambda x: scattered(x, axis_name), lambda g: in_place(g, axis_name))(x)


def gathers_every_share(x, axis_name, split):
    if not split:
        return lax.psum(x, axis_name)
    return own_tokens(lax.all_gather(x, axis_name).sum(0), axis_name)


def leaves_it_to_jax(params, x, key, rate, attend, axis_name):
    """The naive baseline: saves what JAX saves by default."""
    attention, mlp = params["attention"], params["mlp"]
    width, _, num_heads, _ = attention["qkv"]["kernel"].shape
    first, second = jax.random.split(fold_key_over_axes(key, (axis_name,)))
    y = gathered(rms_norm(params["attention_norm"], x), axis_name)
    mixed = attend(y @ attention["qkv"]["kernel"].reshape(width, -1), num_heads)
    x = x + drop(scattered(mixed @ attention["out"]["kernel"].reshape(-1, width), axis_name), rate, first)
    y = gathered(rms_norm(mlp["norm"], x), axis_name)
    hidden = jax.nn.gelu(y @ mlp["up"]["kernel"] + mlp["up"]["bias"])
    return x + drop(scattered(hidden @ mlp["down"]["kernel"], axis_name) + mlp["down"]["bias"], rate, second)


def recomputes_the_layer(params, x, key, rate, attend, axis_name):
    return jax.checkpoint(leaves_it_to_jax, static_argnums=(3, 4, 5))(params, x, key, rate, attend, axis_name)


own_attention = jax.checkpoint(attend, static_argnums=1)


def attends_by_itself(params, x, key, rate, attend, axis_name):
    def own(qkv, num_heads):
        attend(qkv, num_heads)
        return own_attention(qkv, num_heads)

    return sp_block(params, x, key, rate, own, axis_name)


def keeps_the_scores(params, x, key, rate, axis_name):
    """The naive baseline: a block that saves them."""
    return sp_block(params, x, key, rate, attend, axis_name)


def recomputes_all_of_the_layer(params, x, key, rate, axis_name):
    return recomputes_the_layer(params, x, key, rate, attend, axis_name)


def attends_at_once(q, k, v, chunk, axis_name):
    """The naive baseline: all scores of a head at the same time."""
    return ulysses_attention(q, k, v, q.shape[1] * lax.axis_size(axis_name), axis_name)


def gathers_keys_and_values(q, k, v, chunk, axis_name):
    k, v = (gathered(x, axis_name) for x in (k, v))
    own = jnp.arange(q.shape[1]) + lax.axis_index(axis_name) * q.shape[1]
    seen = jnp.arange(k.shape[1]) <= own[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=seen[None, None])


def attends_to_its_own_tokens(q, k, v, chunk, axis_name):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


THERE, BACK, SUMMED, OTHER = "all-gather bytes", "reduce-scatter bytes", "all-reduce bytes", "other collectives"
WHOLE, SHARED = ("data=2 x tensor=4, whole",), ("tensor=8, 2 key heads",)
enter, leave = partial(patch, enter_tensor_region), partial(patch, leave_tensor_region)
block, ulysses = partial(patch, sp_block), partial(patch, ulysses_attention)
GATHER, SCATTER = "lax.all_gather(x,", "lax.psum_scatter(x,"
# The gradient of ``x`` divided by the size of the axis.
MEAN = "x / lax.axis_size(axis_name) + lax.stop_gradient(x - x / lax.axis_size(axis_name))"
OF_NORM = MEAN.replace("x ", 'norm["scale"] ')
SENT_ROUND = {"drop(y, rate, first)": there_and_back("drop(y, rate, first)", "axis_name")}


def both(name: str, edits: dict[str, str], *fails: str) -> tuple[Mutant, Mutant]:
    """The same mistake in ``sp_block``, and in ``selective_recompute``, which calls it."""
    return (block(name, edits, *fails), patch(selective_recompute, f"{name}_again", edits, *fails, inside=sp_block))


MUTANTS = (
    mutant(ENTER := "enter_tensor_region", sums_what_it_places, THERE, BACK, SUMMED),
    mutant(ENTER, takes_its_own_share_of_the_gradient, *GRADIENTS, BACK),
    mutant(ENTER, sums_the_gradient_and_takes_its_part, BACK, SUMMED),
    mutant(ENTER, interleaves_the_tokens, "gradients", "values"),
    enter("averages_the_gradient", {GATHER: f"lax.all_gather({MEAN},"}, *GRADIENTS),
    enter("averages_the_gradient_of_all", {"as_varying(x,": f"as_varying({MEAN},"}, *GRADIENTS, shown_by=WHOLE),
    enter("leaves_the_type", {"as_varying(x, axis_name)": "x"}, "values", shown_by=WHOLE),
    enter("sends_them_round", {GATHER: f"lax.all_gather({there_and_back('x', 'axis_name')},"}, OTHER),
    mutant(LEAVE := "leave_tensor_region", sums_and_keeps_its_tokens, THERE, BACK, SUMMED),
    mutant(LEAVE, gives_back_its_own_tokens_gradient, *GRADIENTS, THERE),
    mutant(LEAVE, gathers_every_share, THERE, BACK),
    leave("averages_the_shares", {SCATTER: "lax.psum_scatter(x / lax.axis_size(axis_name),"}, *NUMBERS),
    leave("averages_the_gradient_of_shares", {SCATTER: f"lax.psum_scatter({MEAN},"}, *GRADIENTS),
    leave(
        "types_the_sum_as_each_devices_own",
        {"lax.psum(x, axis_name)": "as_varying(lax.psum(x, axis_name), axis_name)"},
        *(*GRADIENTS, SUMMED),
        shown_by=WHOLE,
    ),
    leave("sends_shares_round", {SCATTER: f"lax.psum_scatter({there_and_back('x', 'axis_name')},"}, OTHER),
    mutant("sp_block", leaves_it_to_jax, "live temporaries"),
    mutant("sp_block", recomputes_the_layer, BACK, "FLOPs"),
    mutant("sp_block", attends_by_itself, *NUMBERS, shown_by=("data=2 x model=3",)),
    mutant("selective_recompute", keeps_the_scores, "live temporaries"),
    mutant("selective_recompute", recomputes_all_of_the_layer, BACK, "FLOPs"),
    block("saves_everything_of_a_gelu", {"    @jax.checkpoint\n    def back": "    def back"}, "live temporaries"),
    *both("drops_the_same_on_every_device", {"fold_key_over_axes(key, (axis_name,))": "key"}, *NUMBERS),
    *both(
        "forgets_the_gradient_of_the_norms", {"rms_norm(norm": "rms_norm(lax.stop_gradient(norm)"}, *GRADIENTS, SUMMED
    ),
    *both("averages_the_gradient_of_the_norms", {"rms_norm(norm": f'rms_norm({{"scale": {OF_NORM}}}'}, *GRADIENTS),
    *both("sends_what_it_adds_round", SENT_ROUND, OTHER),
    *both(
        "gathers_what_it_adds",
        {"drop(y, rate, first)": gathered_and_scattered("drop(y, rate, first)", "axis_name")},
        *(THERE, BACK),
    ),
    block(
        "computes_a_product_again",
        {
            "jax.nn.gelu(hidden) @ kernel": "jax.nn.gelu(hidden + mlp['up']['bias']) @ kernel",
            'hidden = into(mlp["norm"], mlp["up"]["kernel"], x) + mlp["up"]["bias"]': "whole = x",
            'back(hidden, mlp["down"]["kernel"])': (
                'jax.checkpoint(lambda x: back(into(mlp["norm"], mlp["up"]["kernel"], x), mlp["down"]["kernel"]))(x)'
            ),
        },
        "FLOPs",
        THERE,
    ),
    mutant("ulysses_attention", attends_at_once, "largest temporary"),
    mutant("ulysses_attention", gathers_keys_and_values, "all-to-all bytes", OTHER, "largest temporary"),
    mutant("ulysses_attention", attends_to_its_own_tokens, *NUMBERS, "all-to-all bytes", "largest temporary"),
    ulysses(
        "sends_key_heads_to_others",
        {"jnp.repeat(x, copies, axis=2)": "jnp.tile(x, (1, 1, copies, 1))"},
        *NUMBERS,
        shown_by=SHARED,
    ),
    ulysses(
        "sends_a_key_head_for_each_query_head",
        {"lax.axis_size(axis_name) // k.shape[2])": "q.shape[2] // k.shape[2])"},
        "all-to-all bytes",
    ),
    ulysses(
        "averages_the_gradient_of_copies",
        {"jnp.repeat(x, copies, axis=2)": "jnp.repeat(x / copies + lax.stop_gradient(x - x / copies), copies, axis=2)"},
        *GRADIENTS,
        shown_by=SHARED,
    ),
    ulysses(
        "forgets_the_gradient_of_keys",
        {"    mixed =": "    k = k / 2 + lax.stop_gradient(k / 2)\n    mixed ="},
        *GRADIENTS,
    ),
    ulysses(
        "forgets_the_scale",
        {"mask=seen[None, None])": "mask=seen[None, None], scale=1.0)"},
        *NUMBERS,
        inside=attend_in_chunks,
    ),
    ulysses("sends_queries_round", {"to_heads(q)": f"to_heads({there_and_back('q', 'axis_name')})"}, OTHER),
)

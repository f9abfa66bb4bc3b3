"""Wrong answers for ``single_device``: real mistakes, and the facts that they fail."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from autograder.chapters.mutant import GRADIENTS, NUMBERS, WRONG, mutant, patch
from solutions.single_device import (
    accumulate_gradients,
    chunked_attention,
    mixed_precision_loss,
    remat_layers,
    scaled_step,
    scan_layers,
)


def differentiates_the_scanned_loss(loss_fn, params, batch, num_microbatches):
    """The gradient of a mean over microbatches: all of their activations are kept for the backward pass."""
    parts = jax.tree.map(lambda leaf: leaf.reshape(num_microbatches, -1, *leaf.shape[1:]), batch)

    def mean_loss(params):
        def step(total, part):
            return total + loss_fn(params, part) / num_microbatches, None

        return lax.scan(step, jnp.zeros(()), parts)[0]

    return jax.value_and_grad(mean_loss)(params)


def keeps_the_square(q, k, v, chunk):
    """Textbook attention."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def recomputes_twice(q, k, v, chunk):
    return jax.checkpoint(chunked_attention, static_argnums=3)(q, k, v, chunk)


mixed, accumulate, scan = (partial(patch, f) for f in (mixed_precision_loss, accumulate_gradients, scan_layers))
remat, scaled, attend = (partial(patch, f) for f in (remat_layers, scaled_step, chunked_attention))
PRODUCTS = "jax.checkpoint_policies.dots_saveable"
NO_GRADIENT = {"return x": "return lax.stop_gradient(x)"}
BUT_THE_LAST = {"stacked_params)": "jax.tree.map(lambda leaf: leaf[:-1], stacked_params))"}
OF_BFLOAT16 = ("gradient error", *WRONG)
TEMPORARIES, FUNCTIONS = "live temporaries", "float32 functions and sums"
SQUARE = ("largest temporary", TEMPORARIES)

MUTANTS = (
    mixed("computes_in_float32", {"x.astype(jnp.bfloat16)": "x"}, TEMPORARIES, "product dtypes"),
    mixed("takes_softmax_in_bfloat16", {", k).astype(jnp.float32)": ", k)"}, FUNCTIONS),
    mixed(
        "takes_loss_in_bfloat16",
        {'logits.astype(jnp.float32), batch["targets"])': 'logits, batch["targets"]).astype(jnp.float32)'},
        FUNCTIONS,
    ),
    mixed("takes_norms_in_bfloat16", {"scale, x.astype(jnp.float32)": "low(scale), x"}, FUNCTIONS),
    mixed(
        "squares_in_bfloat16",
        {
            "rms_norm(scale, x.astype(jnp.float32))": (
                "x.astype(jnp.float32) * scale"
                " * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True, dtype=jnp.float32) + 1e-6)"
            )
        },
        FUNCTIONS,
    ),
    mixed("forgets_to_scale_scores", {" * q.shape[-1] ** -0.5": ""}, *OF_BFLOAT16, shown_by=("2 layers", "width 48")),
    mixed(
        "takes_a_softmax_without_its_maximum",
        {
            "causal_softmax(scores)": (
                "(lambda e: e / e.sum(-1, keepdims=True))(jnp.tril(jnp.ones(scores.shape[-2:])) * jnp.exp(scores))"
            )
        },
        *OF_BFLOAT16,
    ),
    mixed(
        "has_a_gradient_that_is_five_percent_too_large",
        {'low(params["head"])': 'low(1.05 * params["head"] - lax.stop_gradient(0.05 * params["head"]))'},
        "gradient error",
    ),
    accumulate("sums_microbatches", {"leaf / num_microbatches": "leaf"}, *NUMBERS),
    accumulate(
        "divides_the_loss_only",
        {"jax.tree.map(lambda leaf: leaf / num_microbatches, total)": "(total[0] / num_microbatches, total[1])"},
        *GRADIENTS,
    ),
    accumulate(
        "unrolls_the_scan",
        {"tree.map(cut, batch)": "tree.map(cut, batch), unroll=num_microbatches"},
        TEMPORARIES,
        "program size",
        shown_by=("8 microbatches", "24 microbatches"),
    ),
    mutant("accumulate_gradients", differentiates_the_scanned_loss, TEMPORARIES),
    accumulate("computes_the_loss_again", {"jax.value_and_grad(": "loss_fn(params, microbatch), jax.grad("}, "FLOPs"),
    scan(
        "unrolls_the_loop",
        {"stacked_params)": "stacked_params, unroll=True)"},
        "program size",
        shown_by=("24 layers", "48 layers"),
    ),
    scan("runs_backwards", {"stacked_params)": "stacked_params, reverse=True)"}, *NUMBERS),
    scan("leaves_out_the_last_layer", BUT_THE_LAST, *NUMBERS),
    scan("cuts_gradients_between_layers", {"params, x), None": "params, lax.stop_gradient(x)), None"}, *GRADIENTS),
    scan("stops_gradients", NO_GRADIENT, *GRADIENTS),
    remat("keeps_everything", {"    @jax.checkpoint\n": ""}, TEMPORARIES),
    remat(
        "keeps_every_product",
        {"@jax.checkpoint": f"@lambda step: jax.checkpoint(step, policy={PRODUCTS})"},
        TEMPORARIES,
    ),
    remat("checkpoints_twice", {"lax.scan(step": "jax.checkpoint(lax.scan, static_argnums=0)(step"}, "FLOPs"),
    remat("stops_gradients_of_remat", NO_GRADIENT, "FLOPs", *GRADIENTS, TEMPORARIES),
    remat("leaves_out_the_last_of_twelve", BUT_THE_LAST, *NUMBERS),
    scaled(
        "casts_to_bfloat16",
        {"jnp.float16": "jnp.bfloat16"},
        "good steps",
        "losses",
        "product dtypes",
        "scale",
        "skipped steps",
        "values",
        shown_by=("one bad step", "scale far too large"),
    ),
    scaled(
        "looks_at_kernels_alone",
        {"for g in jax.tree.leaves(gradients)]": "for g in jax.tree.leaves(gradients) if g.ndim > 1]"},
        *("good steps", "losses", "scale", "skipped steps", "values"),
        shown_by=("scale of 1",),
    ),
    scaled(
        "sums_gradients_in_float16",
        {
            "jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradients)]))": (
                "jnp.isfinite(sum(jnp.sum(g.astype(jnp.float16)) for g in jax.tree.leaves(gradients)))"
            )
        },
        *("good steps", "losses", "scale", "values"),
        shown_by=("scale of 1",),
    ),
    scaled("halves_below_one", {'state["scale"] / 2, 1': 'state["scale"] / 2, 0'}, "scale", shown_by=("scale of 1",)),
    scaled(
        "keeps_parameters_in_float16",
        {"where(finite, p - ": "where(finite, p.astype(jnp.float16).astype(p.dtype) - "},
        "float32 parameters",
    ),
    scaled("grows_a_step_late", {">= growth_interval": "> growth_interval"}, "good steps", "scale"),
    scaled("never_grows", {'2 * state["scale"]': 'state["scale"]'}, "scale"),
    mutant("chunked_attention", keeps_the_square, *SQUARE),
    attend("keeps_every_chunk", {"    @jax.checkpoint\n": ""}, *SQUARE),
    mutant("chunked_attention", recomputes_twice, "FLOPs"),
    attend("forgets_to_correct_the_sum", {"total * shrink +": "total +"}, *WRONG),
    attend("begins_with_a_maximum_of_zero", {"(nothing - jnp.inf,": "(nothing,"}, *WRONG),
    attend("masks_with_minus_a_hundred", {"-jnp.inf)": "-100)"}, *WRONG),
)

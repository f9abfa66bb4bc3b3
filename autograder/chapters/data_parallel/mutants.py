"""Wrong answers for ``data_parallel``: real mistakes, and the facts that they fail."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
from jax import lax

from autograder.chapters.mutant import GRADIENTS, NUMBERS, gathered_and_scattered, in_microbatches, mutant, patch
from course.mesh import as_varying
from course.model import full_loss
from solutions.data_parallel import fold_key_over_axes, overlapped_gradients, sync_gradients, train_step_dp


def _share(batch: Any, axis_name: str) -> Any:
    """A function that returns the fraction of all devices' valid rows that are in a part of the batch."""
    count = lax.psum(jnp.sum(batch["mask"]), axis_name)
    return lambda part: jnp.sum(part["mask"]) / count


def _accumulated(params: Any, parts: Any, model: Any, axis_name: str, share: Any) -> Any:
    """This device's share of loss and gradient, summed over the parts."""

    def add(total, part):
        loss_and_gradients = jax.value_and_grad(lambda p: share(part) * full_loss(model, p, part))(params)
        return jax.tree.map(jnp.add, total, loss_and_gradients), None

    zeros = (as_varying(jnp.zeros(()), axis_name), jax.tree.map(jnp.zeros_like, params))
    return lax.scan(add, zeros, parts)[0]


def reduces_after_the_backward_pass(params, batch, model, axis_name, num_microbatches):
    """Accumulates, and then synchronises: no computation overlaps the communication."""
    share = _share(batch, axis_name)
    loss, total = _accumulated(params, in_microbatches(batch, num_microbatches), model, axis_name, share)
    return loss, lax.psum(total, axis_name)


def _met(axis_name: str) -> Any:
    """An identity whose gradient is the sum over devices of the cotangent plus the gradient accumulated before."""

    @jax.custom_vjp
    def meet(params, before):
        return params

    def backward(before, gradient):
        synced = jax.tree.map(lambda g, b: lax.psum(g + b, axis_name), gradient, before)
        own = jax.tree.map(lambda g: lax.pcast(g, axis_name, to="varying"), synced)
        return own, jax.tree.map(jnp.zeros_like, before)

    meet.defvjp(lambda params, before: (params, before), backward)
    return meet


def reduces_in_the_layers_own_iteration(params, batch, model, axis_name, num_microbatches):
    """Layer by layer, but the sums are ready only when the iteration has nothing left to compute."""
    parts = in_microbatches(batch, num_microbatches)
    head, last = (jax.tree.map(lambda rows, c=c: rows[c], parts) for c in (slice(-1), -1))
    share, meet = _share(batch, axis_name), _met(axis_name)
    loss, total = _accumulated(params, head, model, axis_name, share)

    def loss_of(params):
        x = model.embed(meet(params["embed"], total["embed"]), last["inputs"])
        x, _ = lax.scan(lambda x, p: (model.layer(meet(*p), x), None), x, (params["layers"], total["layers"]))
        return share(last) * model.loss(meet(params["head"], total["head"]), x, last["targets"], last["mask"])

    last_loss, gradients = jax.value_and_grad(loss_of)(params)
    return loss + last_loss, gradients


fold, sync = (partial(patch, f) for f in (fold_key_over_axes, sync_gradients))
step, overlapped = (partial(patch, f) for f in (train_step_dp, overlapped_gradients))
OTHERS = "other collectives"
ALL_REDUCES = ("all-reduce bytes", "all-reduces")
OWN_KEY = "jax.random.fold_in(key, lax.axis_index(name))"
ADDED = "jax.random.wrap_key_data(jax.random.key_data(key) + 7919 * jnp.uint32(1 + lax.axis_index(name)))"
OWN_DATA = f"jax.random.key_data({OWN_KEY})"
VARYING = 'lax.pcast(p, axis_name, to="varying")'
SYNCED = "lax.pmean(gradient, replicated_over) if replicated_over else gradient"
LOSS = "loss + share(last) * last_loss"

# Masks and weight decay, in train_step_dp.
COUNT, OWN = 'lax.psum(jnp.sum(batch["mask"]), axis_name)', 'jnp.sum(batch["mask"])'
SHARE = 'jnp.sum(microbatch["mask"]) / count'
TOTAL = "lax.psum(total, axis_name)"
ALL = 'batch = {**batch, "mask": jnp.ones_like(batch["mask"])}'
ALIKE = "jnp.ones_like(last_loss) / (num_microbatches * lax.axis_size(axis_name))"
RETURNED = "loss, gradients\n    ### END"

MUTANTS = (
    fold("keeps_the_key", {OWN_KEY: "key"}, "values"),
    fold(
        "folds_in_the_first_axis_only",
        {"in axis_names:": "in axis_names[:1]:"},
        "values",
        shown_by=("data=4 x tensor=2, over data and tensor",),
    ),
    fold("ignores_the_key", {"for name": "key = jax.random.key(0)\n    for name"}, "values"),
    fold(
        "gathers_keys_and_takes_its_own",
        {OWN_KEY: f"jax.random.wrap_key_data(lax.all_gather({OWN_DATA}, name)[lax.axis_index(name)])"},
        "communication",
    ),
    fold("adds_to_the_key", {OWN_KEY: ADDED}, "values"),
    sync("averages_every_leaf", {" if name not in split_over": ""}, *ALL_REDUCES, "values"),
    sync("sums", {"lax.pmean": "lax.psum"}, "values"),
    sync(
        "looks_for_axes_in_the_spec_as_text",
        {"jax.tree.leaves(tuple(spec))": "str(spec)"},
        "all-reduce bytes",
        "values",
        shown_by=("fsdp_transpose=3 x fsdp=2, over fsdp",),
    ),
    sync("leaves_everything", {SYNCED: "gradient"}, "all-reduce bytes", "values"),
    sync(
        "averages_leaves_that_are_whole_everywhere",
        {"if replicated_over": "if not split_over"},
        "all-reduce bytes",
        "values",
    ),
    sync(
        "gathers_and_averages",
        {"lax.pmean(gradient, replicated_over)": "jnp.mean(lax.all_gather(gradient, replicated_over), 0)"},
        "all-reduce bytes",
        OTHERS,
    ),
    step("takes_all_rows_at_once", {"    micro": "    num_microbatches = 1\n    micro"}, "live temporaries"),
    step(
        "averages_every_microbatchs_loss",
        {
            "loss_and_gradients), None": (
                '(lax.pcast(lax.pmean(loss_and_gradients[0], axis_name), axis_name, to="varying"), '
                "loss_and_gradients[1])), None"
            )
        },
        *ALL_REDUCES,
    ),
    step("averages_shares", {TOTAL: TOTAL.replace("psum", "pmean")}, *NUMBERS),
    step("ignores_the_mask", {"    varying =": f"    {ALL}\n    varying ="}, *NUMBERS),
    step(
        "averages_the_devices_means",
        {COUNT: f"jnp.maximum({OWN}, 1)", TOTAL: TOTAL.replace("psum", "pmean")},
        "all-reduce bytes",
        *NUMBERS,
    ),
    step(
        "divides_by_nothing_where_nothing_counts",
        {
            SHARE: SHARE.replace("count", OWN),
            TOTAL: TOTAL.replace("total", f"jax.tree.map(lambda x: x * ({OWN} / count), total)"),
        },
        *NUMBERS,
    ),
    step("decays_every_leaf", {" if matrix else g": ""}, "values"),
    step("takes_stacked_biases_for_kernels", {' - (part == "layers")': ""}, "values"),
    step(
        "returns_gradients_with_decay",
        {RETURNED: RETURNED.replace("gradients", "jax.tree.map(lambda p, g: g + weight_decay * p, params, gradients)")},
        *GRADIENTS,
    ),
    step(
        "uses_the_first_microbatch_only",
        {"rows.reshape(num_microbatches, -1,": "rows[: len(rows) // num_microbatches].reshape(1, -1,"},
        *GRADIENTS,
        "live temporaries",
        "values",
    ),
    step("broadcasts_the_parameters_every_step", {VARYING: f"lax.all_gather({VARYING}, axis_name)[0]"}, OTHERS),
    mutant("overlapped_gradients", reduces_after_the_backward_pass, "exposed communication", "predicted time"),
    mutant("overlapped_gradients", reduces_in_the_layers_own_iteration, "exposed communication"),
    overlapped(
        "fills_the_wait_with_the_work_of_another_pass",
        {
            "gradient, dx = jax.vjp(model.layer, layer, x)[1](dx)": (
                "gradient = jax.vjp(lambda p: model.layer(p, x), layer)[1](dx)[0]; "
                "dx = jax.vjp(lambda x: model.layer(layer, x), lax.optimization_barrier(x))[1](dx)[0]"
            )
        },
        "predicted time",
    ),
    overlapped(
        "weighs_the_last_microbatch_as_all_rows", {"head_backward(share(last))": f"head_backward({ALIKE})"}, *GRADIENTS
    ),
    overlapped("sums_the_loss", {LOSS: f"lax.psum({LOSS}, axis_name)"}, "all-reduce bytes", "values"),
    overlapped("sends_the_loss_round", {LOSS: gathered_and_scattered(LOSS, "axis_name")}, "other collectives"),
)

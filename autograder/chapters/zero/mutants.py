"""Wrong answers for ``zero``: real mistakes, and the facts that they fail."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autograder.chapters.mutant import NUMBERS, gathered_and_scattered, in_microbatches, mutant, patch, there_and_back
from autograder.chapters.zero.alternatives import own_part
from course.mesh import as_varying
from course.model import full_loss
from solutions.zero import global_norm, shard_optimizer_state, sharded_adamw, zero1_step, zero2_step


def _gather(tree, specs, axis_name):
    def gather(leaf, spec):
        return lax.all_gather(leaf, axis_name, axis=spec.index(axis_name), tiled=True) if axis_name in spec else leaf

    return jax.tree.map(gather, tree, specs)


def _parts_of_mean(gradients, specs, axis_name):
    """This device's part of the mean of each split leaf; leaves that stay whole are unchanged."""

    def part(gradient, spec):
        if axis_name not in spec:
            return gradient
        total = lax.psum_scatter(gradient, axis_name, scatter_dimension=spec.index(axis_name), tiled=True)
        return total / lax.axis_size(axis_name)

    return jax.tree.map(part, gradients, specs)


def gathers_every_leaf(tree, specs):
    """Puts every leaf together to take its norm."""

    def whole(leaf, spec):
        for dim, axes in enumerate(spec):
            leaf = lax.all_gather(leaf, axes, axis=dim, tiled=True) if axes else leaf
        return leaf

    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(jax.tree.map(whole, tree, specs))))


def counts_every_copy(tree, specs):
    """One sum over all devices, although some of them hold copies."""
    total: Any = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))
    all_axes = {axis for spec in jax.tree.leaves(specs) for axis in jax.tree.leaves(tuple(spec))}
    for axis in all_axes:
        total = as_varying(total, axis)
    return jnp.sqrt(lax.psum(total, tuple(all_axes)))


def gathers_moments_and_gradients(params, gradients, state, specs, axis_name, config):
    """Updates whole leaves on every device, and keeps parts of the moments."""
    norm, count = global_norm(gradients, specs), state["count"] + 1
    time, keep = count.astype(jnp.float32), jnp.minimum(1, config.clip / norm)
    trees = (_gather(tree, specs, axis_name) for tree in (gradients, state["m"], state["v"]))

    def update(path, leaf, gradient, m, v):
        m = config.beta1 * m + (1 - config.beta1) * keep * gradient
        v = config.beta2 * v + (1 - config.beta2) * (keep * gradient) ** 2
        mean, square = m / (1 - config.beta1**time), v / (1 - config.beta2**time)
        decay = config.weight_decay if leaf.ndim - (path[0].key == "layers") >= 2 else 0.0
        return leaf - config.learning_rate * (mean / (jnp.sqrt(square) + config.eps) + decay * leaf), m, v

    updated = jax.tree.map_with_path(update, params, *trees)
    params, *moments = jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0, 0)), updated)
    m, v = (jax.tree.map(lambda leaf, spec: own_part(leaf, spec, axis_name), moment, specs) for moment in moments)
    return params, {"m": m, "v": v, "count": count}, norm


def updates_whole_leaves(params, state, specs, batch, model, axis_name, config):
    """Data parallelism that stores the moments in parts."""
    loss, gradients = jax.value_and_grad(full_loss, argnums=1)(model, params, batch)
    parts = _parts_of_mean(gradients, specs, axis_name)
    parts = jax.tree.map(lambda g, spec: g if axis_name in spec else lax.pmean(g, axis_name), parts, specs)
    params, state, norm = gathers_moments_and_gradients(params, parts, state, specs, axis_name, config)
    return params, state, lax.pmean(loss, axis_name), norm


def _after(total, params, state, specs, axis_name, num_microbatches, config):
    loss, gradients = jax.tree.map(lambda x: x / num_microbatches, total)
    gradients = jax.tree.map(lambda g, s: g if axis_name in s else lax.pmean(g, axis_name), gradients, specs)
    params, state, norm = sharded_adamw(params, gradients, state, specs, axis_name, config)
    return params, state, lax.pmean(loss, axis_name), norm


def _start(like, axis_name):
    return lax.pcast(jnp.zeros(()), axis_name, to="varying"), jax.tree.map(jnp.zeros_like, like)


def keeps_whole_gradients_between_microbatches(params, state, specs, batch, model, axis_name, num_microbatches, config):
    """Gradient accumulation as in data parallelism, and one reduce-scatter at the end: stage 1."""

    def add(total, rows):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(full_loss, argnums=1)(model, params, rows)), None

    (loss, gradients), _ = lax.scan(add, _start(params, axis_name), in_microbatches(batch, num_microbatches))
    total = loss, _parts_of_mean(gradients, specs, axis_name)
    return _after(total, params, state, specs, axis_name, num_microbatches, config)


def scatters_after_each_backward_pass(params, state, specs, batch, model, axis_name, num_microbatches, config):
    """Parts between microbatches, but the whole gradient of all layers before each reduce-scatter."""

    def add(total, rows):
        loss, gradients = jax.value_and_grad(full_loss, argnums=1)(model, params, rows)
        return jax.tree.map(jnp.add, total, (loss, _parts_of_mean(gradients, specs, axis_name))), None

    total, _ = lax.scan(add, _start(state["m"], axis_name), in_microbatches(batch, num_microbatches))
    return _after(total, params, state, specs, axis_name, num_microbatches, config)


def stacks_the_parts_of_a_microbatch(params, state, specs, batch, model, axis_name, num_microbatches, config):
    """Each layer's gradient is scattered by its transpose; JAX stacks the parts before they are added."""

    def use(part, leaf, spec):
        whole = jax.custom_vjp(lambda part, leaf: leaf)
        whole.defvjp(lambda part, leaf: (leaf, None), lambda _, g: (_parts_of_mean(g, spec, axis_name), None))
        return whole(part, leaf)

    own = jax.tree.map(lambda spec: jax.P(*spec[1:]), specs["layers"])

    @jax.checkpoint
    def layer(x, now):
        return model.layer(jax.tree.map(use, *now, own), x), None

    def loss_of(parts, rows):
        embed, head = (jax.tree.map(use, parts[end], params[end], specs[end]) for end in ("embed", "head"))
        x, _ = lax.scan(layer, model.embed(embed, rows["inputs"]), (parts["layers"], params["layers"]))
        return model.loss(head, x, rows["targets"])

    def add(total, rows):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_of)(start[1], rows)), None

    start = _start(state["m"], axis_name)
    total, _ = lax.scan(add, start, in_microbatches(batch, num_microbatches))
    return _after(total, params, state, specs, axis_name, num_microbatches, config)


begin, norm, adamw = (partial(patch, f) for f in (shard_optimizer_state, global_norm, sharded_adamw))
zero1, zero2 = (partial(patch, f) for f in (zero1_step, zero2_step))

# In shard_optimizer_state.
PARTS = "parts, specs = shard_params(params, axis_name, min_size)"
ZEROS = "jax.tree.map(jnp.zeros_like, parts)"
SENT = (
    "jax.tree.map(lambda part, spec: 0 * "
    f"({gathered_and_scattered('part', 'axis_name')} if any(spec) else part), parts, specs)"
)
# In global_norm.
REDUCED = "lax.psum(total, axes) if axes else total"
# In sharded_adamw.
NORM = "global_norm(gradients, specs)"
KEEP = "jnp.minimum(1, config.clip / norm)"
PUT_TOGETHER = "lax.all_gather(part, axis_name, axis=dim, tiled=True)"
PADDED = (
    "lax.psum(lax.dynamic_update_slice_in_dim("
    "0 * leaf, part, lax.axis_index(axis_name) * m.shape[dim], dim), axis_name)"
)
IN_BFLOAT16 = f"{PUT_TOGETHER.replace('part', 'part.astype(jnp.bfloat16)')}.astype(jnp.float32)"
# In the steps.
SCATTERED = "lax.psum_scatter(gradient, axis_name, scatter_dimension=spec.index(axis_name), tiled=True)"
OWN_PART = (
    "(lambda g, dim, n: lax.dynamic_slice_in_dim(g, lax.axis_index(axis_name) * (g.shape[dim] // n), "
    "g.shape[dim] // n, dim))({}, spec.index(axis_name), lax.axis_size(axis_name))"
)
MEAN_OF_PARTS = "return total / lax.axis_size(axis_name)"
MEAN_OF_WHOLE = "return lax.pmean(gradient, axis_name)"
MEAN_LOSS = "lax.pmean(loss, axis_name)"
IN_PLACE = "total = jax.tree.map(lambda t, g, s: t.at[number].add(part_of(g, s)), total, gradients, layer_specs)"
WHOLE_AT_THE_END = "g if axis_name in s else lax.pmean(g, axis_name)"

STATE = ("split dims", "state bytes per device")
GATHERED, SCATTERED_BYTES, REDUCED_BYTES = "all-gather bytes", "reduce-scatter bytes", "all-reduce bytes"
OTHERS, TEMPORARIES = "other collectives", "live temporaries"

MUTANTS = (
    begin("keeps_whole_moments", {PARTS: "parts, specs = params, jax.tree.map(lambda _: jax.P(), params)"}, *STATE),
    begin("ignores_min_size", {PARTS: PARTS.replace("min_size)", "0)")}, *STATE),
    begin("takes_min_size_for_bytes", {PARTS: PARTS.replace("size)", "size // 4)")}, *STATE),
    begin("begins_with_parameters", {ZEROS: "parts"}, "values"),
    begin("counts_from_one", {"jnp.zeros(()": "jnp.ones(()"}, "values"),
    begin("sends_parts_round", {ZEROS: SENT}, "communication"),
    mutant("global_norm", gathers_every_leaf, OTHERS),
    norm("forgets_the_other_devices", {REDUCED: "total"}, "values"),
    mutant("global_norm", counts_every_copy, "values"),
    norm("sums_over_one_axis_alone", {"lax.psum(total, axes)": "lax.psum(total, axes[:1])"}, "values"),
    norm(
        "reduces_whole_leaves",
        {"jnp.sum(leaf**2)": "jnp.sum(lax.psum(leaf**2, axes) if axes else leaf**2)", REDUCED: "total"},
        "all-reduces",
        REDUCED_BYTES,
    ),
    norm(
        "sends_each_sum_twice", {"lax.psum(total, axes)": "lax.psum(jnp.stack([total, total]), axes)[0]"}, REDUCED_BYTES
    ),
    norm(
        "takes_another_order_for_other_axes",
        {"sorted(jax.tree.leaves(tuple(spec)))": "jax.tree.leaves(tuple(spec))"},
        "all-reduces",
        REDUCED_BYTES,
    ),
    mutant("sharded_adamw", gathers_moments_and_gradients, GATHERED),
    adamw(
        "clips_by_the_norm_of_its_parts",
        {NORM: "jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients)))"},
        "values",
        REDUCED_BYTES,
    ),
    adamw("returns_the_clipped_norm", {"}, norm": "}, keep * norm"}, "values"),
    adamw(
        "scales_small_gradients_up", {KEEP: "config.clip / norm"}, "values", shown_by=("node=4 x data=2, over both",)
    ),
    adamw("forgets_to_correct_the_moments", {"m / (1 - config.beta1**time)": "m"}, "values"),
    adamw("decays_stacked_biases", {' - (path[0].key == "layers")': ""}, "values"),
    adamw(
        "decays_through_the_moments",
        {
            "m = config.beta1 * m": "gradient = gradient + decay * part\n        m = config.beta1 * m",
            " + decay * part": "",
        },
        "values",
    ),
    adamw(
        "fixes_the_betas",
        {"config.beta1 * m": "0.8 * m", "config.beta2 * v": "0.9 * v"},
        "values",
        shown_by=("pipe=3 x tensor=2",),
    ),
    adamw("puts_eps_under_the_root", {"jnp.sqrt(square) + config.eps": "jnp.sqrt(square + config.eps)"}, "values"),
    adamw("sums_padded_parts", {PUT_TOGETHER: PADDED}, GATHERED, REDUCED_BYTES),
    adamw("gathers_in_bfloat16", {PUT_TOGETHER: IN_BFLOAT16}, "values", GATHERED),
    adamw("sends_the_norm_round", {"}, norm": f"}}, {there_and_back('norm', 'axis_name')}"}, OTHERS),
    mutant("zero1_step", updates_whole_leaves, GATHERED, TEMPORARIES),
    zero1(
        "reduces_whole_gradients",
        {SCATTERED: OWN_PART.format("lax.psum(gradient, axis_name)")},
        SCATTERED_BYTES,
        REDUCED_BYTES,
    ),
    zero1("keeps_its_own_gradient", {SCATTERED: OWN_PART.format("gradient")}, *NUMBERS, SCATTERED_BYTES),
    zero1("sums_gradients", {MEAN_OF_PARTS: "return total"}, *NUMBERS),
    zero1("forgets_whole_leaves", {MEAN_OF_WHOLE: "return gradient"}, *NUMBERS, REDUCED_BYTES),
    zero1("returns_its_own_loss", {MEAN_LOSS: "loss"}, "values", REDUCED_BYTES),
    zero1("forgets_the_new_state", {"params, state, norm": "params, _, norm"}, *NUMBERS),
    zero1("sends_the_loss_round", {MEAN_LOSS: there_and_back(MEAN_LOSS, "axis_name")}, OTHERS),
    mutant("zero2_step", keeps_whole_gradients_between_microbatches, TEMPORARIES, SCATTERED_BYTES),
    mutant("zero2_step", scatters_after_each_backward_pass, TEMPORARIES),
    mutant("zero2_step", stacks_the_parts_of_a_microbatch, TEMPORARIES),
    zero2(
        "fetches_parameters_in_every_microbatch",
        {
            "loss, total = carry": "loss, total = carry\n        whole = jax.tree.map(lambda leaf, spec: "
            + PUT_TOGETHER.replace("part", OWN_PART.format("leaf")).replace("axis=dim", "axis=spec.index(axis_name)")
            + " if axis_name in spec else leaf, params, specs)",
            'params["embed"])': 'whole["embed"])',
            'params["layers"])': 'whole["layers"])',
            'params["head"]': 'whole["head"]',
            'params["layers"], inputs': 'whole["layers"], inputs',
        },
        GATHERED,
        TEMPORARIES,
    ),
    zero2(
        "scatters_once_after_all_microbatches",
        {
            "if axis_name not in spec:": "if total is not None:",
            "def part_of(gradient, spec):": "def part_of(gradient, spec, total=0):",
            'jax.tree.map(jnp.zeros_like, state["m"])': "jax.tree.map(jnp.zeros_like, params)",
            "g if axis_name in s else": "part_of(g, s, None) if axis_name in s else",
        },
        TEMPORARIES,
        SCATTERED_BYTES,
    ),
    zero2(
        "adds_into_a_new_stack",
        {
            IN_PLACE: "total = jax.tree.map(lambda t, g, s: t + part_of(g, s), total, gradients, layer_specs)",
            "return (dx, total), None": "return dx, total",
            "dx, total = carry": "dx = carry",
            "number, layer, x = at": "total, layer, x = at",
            '(dx, of_layers), _ = lax.scan(backward, (dx, total["layers"])': "dx, of_layers = lax.scan(backward, dx",
            "jnp.arange(model.num_layers)": 'total["layers"]',
        },
        TEMPORARIES,
    ),
    zero2("sums_microbatches", {"x / num_microbatches": "x"}, *NUMBERS),
    zero2("keeps_the_last_microbatch_alone", {".add(part_of": ".set(part_of"}, *NUMBERS),
    zero2("forgets_whole_leaves_in_parts", {WHOLE_AT_THE_END: "g"}, *NUMBERS, REDUCED_BYTES),
    zero2(
        "averages_whole_leaves_every_time",
        {"return gradient\n": "return lax.pcast(lax.pmean(gradient, axis_name), axis_name, to='varying')\n"},
        REDUCED_BYTES,
    ),
    zero2("sends_its_loss_round", {MEAN_LOSS: there_and_back(MEAN_LOSS, "axis_name")}, OTHERS),
)

"""Wrong answers for ``fsdp``: real mistakes, and the facts that they fail."""

from __future__ import annotations

from functools import partial

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from autograder.chapters.mutant import GRADIENTS, NUMBERS, gathered_and_scattered, mutant, patch, there_and_back
from course.mesh import as_varying
from course.model import full_loss
from solutions.fsdp import fsdp_loss, fsdp_train_step, gather_params, hybrid_shard_step, shard_params


def keeps_everything(params, axis_name, min_size):
    """Replicates instead of sharding."""
    return params, jax.tree.map(lambda _: P(), params)


def gathers_four_times(shards, specs, batch, model, axis_name):
    """Recomputes the whole loss around layers that recompute themselves."""
    return jax.checkpoint(lambda parts: fsdp_loss(parts, specs, batch, model, axis_name))(shards)


def computes_a_few_rows_at_a_time(shards, specs, batch, model, axis_name):
    """Reads every weight from memory again for every few rows."""
    layer_specs = jax.tree.map(lambda spec: P(*spec[1:]), specs["layers"])

    @jax.checkpoint
    def layer(x, part):
        weights = gather_params(part, layer_specs, axis_name)
        few = x.reshape(-1, min(32, x.shape[0]), *x.shape[1:])
        return lax.map(lambda rows: model.layer(weights, rows), few).reshape(x.shape), None

    whole = jax.checkpoint(lambda part, name: gather_params(part, specs[name], axis_name), static_argnums=1)
    x = model.embed(whole(shards["embed"], "embed"), batch["inputs"])
    x, _ = lax.scan(layer, x, shards["layers"])
    return model.loss(whole(shards["head"], "head"), x, batch["targets"])


def gathers_everything_first(shards, specs, batch, model, axis_name, learning_rate):
    """The whole model at once: data parallelism with parts."""
    count = batch["mask"].sum()
    weight = count / lax.pmean(count, axis_name)

    def loss_of(parts):
        return weight * full_loss(model, gather_params(parts, specs, axis_name), batch)

    loss, gradients = jax.value_and_grad(loss_of)(shards)
    mean = jax.tree.map(lambda g, spec: g if axis_name in spec else lax.pmean(g, axis_name), gradients, specs)
    return jax.tree.map(lambda part, g: part - learning_rate * g, shards, mean), lax.pmean(loss, axis_name)


def reduces_whole_gradients_between_nodes(shards, specs, batch, model, axis_name, replica_axis, learning_rate):
    """All-reduces whole gradients across nodes, then splits them: right numbers, many times the bytes."""

    def mean(gradient, spec):
        return gradient if axis_name in spec else lax.pmean(gradient, (axis_name, replica_axis))

    whole, split = jax.vjp(lambda parts: gather_params(parts, specs, axis_name), shards)
    loss, gradients = jax.value_and_grad(full_loss, argnums=1)(model, whole, batch)
    gradients = jax.tree.map(lambda g: as_varying(lax.pmean(g, replica_axis), replica_axis), gradients)
    gradients = jax.tree.map(mean, *split(gradients), specs)
    updated = jax.tree.map(lambda part, gradient: part - learning_rate * gradient, shards, gradients)
    return updated, lax.pmean(loss, (axis_name, replica_axis))


shard, gather, loss = (partial(patch, f) for f in (shard_params, gather_params, fsdp_loss))
step, hybrid = (partial(patch, f) for f in (fsdp_train_step, hybrid_shard_step))

# In gather_params.
GATHER = "lax.all_gather(shard, axis_name, axis=dim, tiled=True)"
SCATTER = "lax.psum_scatter(gradient, axis_name, scatter_dimension=dim, tiled=True)"
OWN_PART = "lax.dynamic_slice_in_dim({}, lax.axis_index(axis_name) * shard.shape[dim], shard.shape[dim], dim)"
ZEROS = "jnp.concatenate([jnp.zeros_like(shard)] * lax.axis_size(axis_name), dim)"
PADDED = f"lax.dynamic_update_slice_in_dim({ZEROS}, shard, lax.axis_index(axis_name) * shard.shape[dim], dim)"
SUMMED = f'lax.pcast(lax.psum({PADDED}, axis_name), axis_name, to="varying")'
CUT = {SCATTER: OWN_PART.format("lax.psum(gradient, axis_name)")}

# In fsdp_loss.
HEAD = 'head(shards["head"], x, batch["targets"])'

# In fsdp_train_step.
MEAN_TWICE = {"lax.pmean(g,": "lax.pmean(as_varying(lax.pmean(g, axis_name), axis_name),"}
LAYERS = 'x = layers(shards["layers"], x)'
LAYERS_BY_JAX = 'x, _ = forward(shards["layers"], x)'
IN_TURN = "jax.checkpoint(lambda x, part: (model.layer(gather(part), x), None))"
LAYERS_IN_TURN = f'x, _ = lax.scan({IN_TURN}, x, shards["layers"])'
WEIGHED = 'weight * model.loss(head, x, batch["targets"], batch["mask"])'
WHERE_IT_COMPUTES = "return lax.scan(step, gradient, (stack, inputs), reverse=True)[::-1]"
RESULT = "model.layer(whole, x), (stack, jnp.concatenate([inputs, x[None]]), whole)"
FORWARD_STEP = "def step(carry, part)"
GATHER_FIRST = """coming = gather(part)
            return (model.layer(whole, x), coming)"""
LAYER_FIRST = "return (model.layer(whole, x), gather(part))"

# In hybrid_shard_step.
OWN_LOSS = "(fsdp_loss)(shards, specs, batch, model, axis_name)"
MEAN = "lax.pmean(gradient, replica_axis if axis_name in spec else (axis_name, replica_axis))"
TWICE = "as_varying(lax.pmean(gradient, axis_name), axis_name)"
MEAN_TWICE_INSIDE = (
    f"{MEAN[:-1].replace('gradient, replica_axis', 'gradient if axis_name in spec else ' + TWICE + ', replica_axis')})"
)
INSIDE = "gradient if axis_name in spec else lax.pmean(gradient, axis_name)"
RING = f"""gradient, n = {INSIDE}, lax.axis_size(replica_axis)
        rings = ([(i, (i + shift) % n) for i in range(n)] for shift in range(1, n))
        return sum((lax.ppermute(gradient, replica_axis, ring) for ring in rings), gradient) / n"""

GATHERED, REDUCED, SENT_ACROSS = "all-gather bytes", "reduce-scatter bytes", "bytes between nodes"
TEMPORARIES, SLOW = "live temporaries", "predicted time"
STATE = ("split dims", "state bytes per device")

MUTANTS = (
    mutant("shard_params", keeps_everything, *STATE),
    shard("ignores_min_size", {"leaf.size < min_size or ": ""}, *STATE),
    shard("keeps_leaves_of_min_size", {"leaf.size < min_size": "leaf.size <= min_size"}, *STATE),
    shard("everyone_takes_first_part", {"leaf, index * length": "leaf, 0"}, "values"),
    shard("counts_devices_backwards", {"index * length": "(size - 1 - index) * length"}, "values"),
    gather("sums_gradients", {"return whole(shard)": f"return {GATHER}"}, "gradients"),
    gather("sums_padded_parts", {GATHER: SUMMED, **CUT}, GATHERED, "other collectives", REDUCED),
    gather("all_reduces_gradients", CUT, "other collectives", REDUCED),
    gather("keeps_own_gradient", {SCATTER: OWN_PART.format("gradient")}, "gradients", REDUCED),
    gather("stacks_parts", {"return whole(shard)": "return lax.all_gather(shard, axis_name)"}, "values"),
    loss(
        "keeps_gathered_weights",
        {f"@jax.checkpoint\n    def {part}(": f"def {part}(" for part in ("embed", "layer", "head")},
        TEMPORARIES,
    ),
    mutant("fsdp_loss", gathers_four_times, GATHERED, SLOW),
    mutant("fsdp_loss", computes_a_few_rows_at_a_time, TEMPORARIES, SLOW),
    loss("averages_the_loss", {HEAD: f"lax.pmean({HEAD}, axis_name)"}, "other collectives", "values"),
    loss(
        "forgets_the_first_layers_gradient",
        {'embed(shards["embed"]': 'embed(lax.stop_gradient(shards["embed"])'},
        *GRADIENTS,
        REDUCED,
    ),
    step("gathers_when_it_computes", {LAYERS: LAYERS_IN_TURN}, SLOW),
    step("averages_the_devices_means", {WEIGHED: WEIGHED.removeprefix("weight * ")}, "all-reduce bytes", *NUMBERS),
    step("ignores_the_mask", {WEIGHED: WEIGHED.replace(', batch["mask"]', "")}, *NUMBERS),
    step(
        "divides_by_nothing_where_nothing_counts",
        {WEIGHED: WEIGHED.replace("weight", "weight / count * count")},
        *NUMBERS,
    ),
    step(
        "prefetches_forward_only",
        {
            GATHER_FIRST: LAYER_FIRST,
            "gradient, whole = carry": "gradient = carry",
            "coming = gather(part_before)": "whole = gather(part_before)",
            "(gradient, coming), scatter(of_whole)": "gradient, scatter(of_whole)",
            "layers = take(stack, slice(-1)), inputs[1:]": WHERE_IT_COMPUTES,
        },
        SLOW,
    ),
    step("keeps_gathered_weights_in_step", {LAYERS: LAYERS_BY_JAX}, TEMPORARIES, SLOW),
    step(
        "keeps_the_carry_of_a_checkpoint",
        {
            LAYERS: LAYERS_BY_JAX,
            FORWARD_STEP: f"@jax.checkpoint\n        {FORWARD_STEP}",
            f"{GATHER_FIRST}, x": f"{LAYER_FIRST}, None",
            RESULT: "model.layer(whole, x), None",
        },
        TEMPORARIES,
    ),
    mutant("fsdp_train_step", gathers_everything_first, TEMPORARIES, SLOW),
    step(
        "gathers_round_the_end",
        {
            "slice(1, None)": "jnp.roll(jnp.arange(model.num_layers), -1)",
            RESULT: "x, (stack, inputs, gather(take(stack, -1)))",
        },
        GATHERED,
    ),
    step(
        "gathers_in_bfloat16",
        {
            GATHER: GATHER.replace("shard", "shard.astype(jnp.bfloat16)") + ".astype(jnp.float32)",
            "scatter(gradient": "scatter(gradient.astype(jnp.bfloat16)",
            "(total /": "(total.astype(jnp.float32) /",
        },
        GATHERED,
        REDUCED,
        SLOW,
        *NUMBERS,
        inside=gather_params,
    ),
    step("averages_whole_leaves_twice", MEAN_TWICE, "all-reduce bytes"),
    mutant("hybrid_shard_step", reduces_whole_gradients_between_nodes, SENT_ACROSS),
    hybrid(
        "gathers_four_times_inside_a_node",
        {OWN_LOSS: "(jax.checkpoint(lambda parts: fsdp_loss(parts, specs, batch, model, axis_name)))(shards)"},
        GATHERED,
    ),
    hybrid("forgets_the_other_nodes", {MEAN: INSIDE}, SENT_ACROSS, *NUMBERS),
    hybrid("sums_over_nodes", {"lax.pmean(gradient": "lax.psum(gradient"}, *NUMBERS),
    hybrid("permutes_round_the_nodes", {f"return {MEAN}": RING}, SENT_ACROSS, shown_by=("replica=4 x data=1",)),
    hybrid("averages_whole_leaves_twice_inside", {MEAN: MEAN_TWICE_INSIDE}, "all-reduce bytes"),
    hybrid(
        "sends_the_loss_round_a_node",
        {"lax.pmean(loss, (": f"lax.pmean({there_and_back('loss', 'axis_name')}, ("},
        "other collectives",
    ),
    shard(
        "gathers_the_parts_and_scatters_them",
        {
            "lax.dynamic_slice_in_dim(leaf, index * length, length, dim)": gathered_and_scattered(
                "lax.dynamic_slice_in_dim(leaf, index * length, length, dim)", "axis_name"
            )
        },
        "communication",
    ),
    step(
        "sends_the_loss_round",
        {"lax.pmean(loss, axis_name)": f"lax.pmean({there_and_back('loss', 'axis_name')}, axis_name)"},
        "other collectives",
    ),
    hybrid(
        "gathers_and_scatters_the_loss",
        {
            "lax.pmean(loss, (axis_name, replica_axis))": (
                f"lax.pmean({gathered_and_scattered('loss', 'axis_name')}, (axis_name, replica_axis))"
            )
        },
        "reduce-scatter bytes",
    ),
)

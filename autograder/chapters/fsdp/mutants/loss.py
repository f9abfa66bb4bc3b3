"""Wrong answers for ``fsdp_loss``."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from autograder.chapters.fsdp.mutants.names import (
    GATHERED,
    GRADIENTS,
    NORM,
    OTHERS,
    SCATTERED,
    TEMPORARIES,
    TIME,
    VALUES,
)
from autograder.chapters.fsdp.mutants.parts import sums_gradients
from autograder.proof.mutants import mutant
from course.model import full_loss
from solutions.fsdp import fsdp_loss, gather_params


def layer_specs(specs: Any) -> Any:
    """One layer's specs: those of the stacked leaves without their first entry."""
    return jax.tree.map(lambda spec: P(*spec[1:]), specs["layers"])


def _loss(shards, specs, batch, model, axis_name, gather=gather_params, wrap=lambda f: f) -> Any:
    def layer(x, part):
        return model.layer(gather(part, layer_specs(specs), axis_name), x), None

    x = model.embed(gather(shards["embed"], specs["embed"], axis_name), batch["inputs"])
    x, _ = lax.scan(wrap(layer), x, shards["layers"])
    return model.loss(gather(shards["head"], specs["head"], axis_name), x, batch["targets"])


def keeps_gathered_weights(shards, specs, batch, model, axis_name):
    """Layer by layer, but what was gathered is saved for the backward pass."""
    return _loss(shards, specs, batch, model, axis_name)


def gathers_everything_first(shards, specs, batch, model, axis_name):
    return full_loss(model, gather_params(shards, specs, axis_name), batch)


def names_a_copy(shards, specs, batch, model, axis_name):
    """Tells the policy not to save a named copy of the weights; the gathered original is saved instead."""

    def gather(part, part_specs, axis_name):
        return jax.tree.map(lambda leaf: checkpoint_name(leaf, "gathered"), gather_params(part, part_specs, axis_name))

    policy = jax.checkpoint_policies.save_anything_except_these_names("gathered")
    return _loss(shards, specs, batch, model, axis_name, gather, partial(jax.checkpoint, policy=policy))


def computes_less_where_nobody_runs_it(shards, specs, batch, model, axis_name):
    """Cuts every array to 64, which changes nothing at the sizes that are run."""
    size = lax.axis_size(axis_name)

    def cut(leaf, spec):
        whole = [64 // size if axis_name in spec and dim == spec.index(axis_name) else 64 for dim in range(leaf.ndim)]
        return lax.slice(leaf, [0] * leaf.ndim, [min(limit, dim) for limit, dim in zip(whole, leaf.shape, strict=True)])

    few = {name: cut(rows, P()) for name, rows in batch.items()}
    return full_loss(model, gather_params(jax.tree.map(cut, shards, specs), specs, axis_name), few)


def keeps_weights_behind_a_barrier(shards, specs, batch, model, axis_name):
    """Keeps every gathered weight and hides that from a liveness that does not follow aliases."""

    def gather(part, part_specs, axis_name):
        return jax.tree.map(
            lambda leaf: lax.optimization_barrier(leaf) * 1.0, gather_params(part, part_specs, axis_name)
        )

    return _loss(shards, specs, batch, model, axis_name, gather)


def gathers_four_times(shards, specs, batch, model, axis_name):
    """Recomputes the whole loss around layers that recompute themselves."""
    return jax.checkpoint(lambda parts: fsdp_loss(parts, specs, batch, model, axis_name))(shards)


def averages_the_loss(shards, specs, batch, model, axis_name):
    """Returns the mean over devices, which costs a reduction, and mixes what flows back into the devices' losses."""
    return lax.pmean(fsdp_loss(shards, specs, batch, model, axis_name), axis_name)


def divides_by_devices(shards, specs, batch, model, axis_name):
    """Makes the mean of a sum that was a mean already."""
    return fsdp_loss(shards, specs, batch, model, axis_name) / lax.axis_size(axis_name)


def forgets_the_first_layers_gradient(shards, specs, batch, model, axis_name):
    frozen = {**shards, "embed": jax.tree.map(lax.stop_gradient, shards["embed"])}
    return fsdp_loss(frozen, specs, batch, model, axis_name)


def sums_gradients_of_layers(shards, specs, batch, model, axis_name):
    return _loss(shards, specs, batch, model, axis_name, sums_gradients, jax.checkpoint)


def computes_a_few_rows_at_a_time(shards, specs, batch, model, axis_name):
    """Reads every weight from memory for each few rows."""

    @jax.checkpoint
    def layer(x, part):
        weights = gather_params(part, layer_specs(specs), axis_name)
        few = x.reshape(-1, min(32, x.shape[0]), *x.shape[1:])
        return lax.map(lambda rows: model.layer(weights, rows), few).reshape(x.shape), None

    whole = jax.checkpoint(lambda part, name: gather_params(part, specs[name], axis_name), static_argnums=1)
    x = model.embed(whole(shards["embed"], "embed"), batch["inputs"])
    x, _ = lax.scan(layer, x, shards["layers"])
    return model.loss(whole(shards["head"], "head"), x, batch["targets"])


MUTANTS = (
    mutant("fsdp_loss", keeps_gathered_weights, TEMPORARIES),
    mutant("fsdp_loss", gathers_everything_first, TEMPORARIES),
    mutant("fsdp_loss", names_a_copy, TEMPORARIES),
    mutant("fsdp_loss", computes_less_where_nobody_runs_it, TEMPORARIES, TIME, GATHERED, SCATTERED),
    mutant("fsdp_loss", keeps_weights_behind_a_barrier, TEMPORARIES, TIME),
    mutant("fsdp_loss", gathers_four_times, GATHERED, TIME),
    mutant("fsdp_loss", computes_a_few_rows_at_a_time, TEMPORARIES, TIME),
    mutant("fsdp_loss", averages_the_loss, VALUES, OTHERS),
    mutant("fsdp_loss", divides_by_devices, VALUES, GRADIENTS, NORM),
    mutant("fsdp_loss", forgets_the_first_layers_gradient, GRADIENTS, NORM, SCATTERED),
    mutant("fsdp_loss", sums_gradients_of_layers, GRADIENTS, NORM),
)

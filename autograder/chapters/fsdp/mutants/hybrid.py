"""Wrong answers for ``hybrid_shard_step``."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autograder.chapters.fsdp.mutants.names import BETWEEN, GATHERED, GRADIENTS, NORM, OTHERS, VALUES
from autograder.chapters.fsdp.mutants.step import mean_of_whole
from autograder.proof.mutants import mutant
from course.mesh import as_varying
from course.model import full_loss
from solutions.fsdp import fsdp_loss, hybrid_shard_step


def _step(shards, specs, batch, model, axis_name, replica_axis, learning_rate, average: Any, loss_of: Any = fsdp_loss):
    """A step whose gradients are averaged by ``average(gradients)`` after those of whole leaves are, inside a node."""
    loss, gradients = jax.value_and_grad(loss_of)(shards, specs, batch, model, axis_name)
    gradients = average(mean_of_whole(gradients, specs, axis_name))
    updated = jax.tree.map(lambda part, g: part - learning_rate * g, shards, gradients)
    return updated, lax.pmean(loss, (axis_name, replica_axis))


def _with_gather(gather: Any) -> Any:
    """The whole model's loss with another way to gather; memory is not judged here."""

    def loss_of(shards, specs, batch, model, axis_name):
        whole = jax.tree.map(lambda s, spec: gather(s, spec) if axis_name in spec else s, shards, specs)
        return full_loss(model, whole, batch)

    return loss_of


def _gather(forward: Any, backward: Any, shard: Any, spec: Any) -> Any:
    whole = jax.custom_vjp(partial(forward, spec))
    whole.defvjp(lambda x: (forward(spec, x), None), lambda _, g: (backward(spec, g),))
    return whole(shard)


def _part_of_mean(axis_name: str, spec: Any, gradient: Any) -> Any:
    total = lax.psum_scatter(gradient, axis_name, scatter_dimension=spec.index(axis_name), tiled=True)
    return total / lax.axis_size(axis_name)


def reduces_whole_gradients_between_nodes(shards, specs, batch, model, axis_name, replica_axis, learning_rate):
    """All-reduces whole gradients across nodes, then splits them: right numbers, many times the bytes."""

    def forward(spec, shard):
        return lax.all_gather(shard, axis_name, axis=spec.index(axis_name), tiled=True)

    def backward(spec, gradient):
        return lax.pcast(_part_of_mean(axis_name, spec, lax.pmean(gradient, replica_axis)), replica_axis, to="varying")

    loss_of = _with_gather(partial(_gather, forward, backward))
    return _step(shards, specs, batch, model, axis_name, replica_axis, learning_rate,
                 lambda gradients: _between(gradients, specs, axis_name, replica_axis), loss_of)  # fmt: skip


def _between(gradients: Any, specs: Any, axis_name: str, replica_axis: str) -> Any:
    """Averages whole leaves across nodes; parts are averaged already."""
    return jax.tree.map(lambda g, spec: g if axis_name in spec else lax.pmean(g, replica_axis), gradients, specs)


def gathers_from_every_node(shards, specs, batch, model, axis_name, replica_axis, learning_rate):
    """Gathers over both axes, and uses the first copy of each part."""

    def forward(spec, shard):
        dim = spec.index(axis_name)
        every = lax.all_gather(shard, (replica_axis, axis_name), axis=dim, tiled=True)
        return lax.slice_in_dim(every, 0, shard.shape[dim] * lax.axis_size(axis_name), axis=dim)

    loss_of = _with_gather(partial(_gather, forward, partial(_part_of_mean, axis_name)))
    return _step(shards, specs, batch, model, axis_name, replica_axis, learning_rate,
                 lambda gradients: lax.pmean(gradients, replica_axis), loss_of)  # fmt: skip


def forgets_the_other_nodes(shards, specs, batch, model, axis_name, replica_axis, learning_rate):
    """Every node trains a model of its own."""
    return _step(shards, specs, batch, model, axis_name, replica_axis, learning_rate, lambda gradients: gradients)


def sums_over_nodes(shards, specs, batch, model, axis_name, replica_axis, learning_rate):
    return _step(shards, specs, batch, model, axis_name, replica_axis, learning_rate,
                 lambda gradients: lax.psum(gradients, replica_axis))  # fmt: skip


def divides_by_two_nodes(shards, specs, batch, model, axis_name, replica_axis, learning_rate):
    """A hard-coded number of nodes."""

    def average(gradients):
        return jax.tree.map(lambda g: lax.psum(g, replica_axis) / 2, gradients)

    return _step(shards, specs, batch, model, axis_name, replica_axis, learning_rate, average)


def averages_over_all_devices(shards, specs, batch, model, axis_name, replica_axis, learning_rate):
    """A mean over both axes for every leaf, which mixes different parts of it."""

    def average(gradients):
        return jax.tree.map(lambda g: lax.pmean(as_varying(g, axis_name), (axis_name, replica_axis)), gradients)

    return _step(shards, specs, batch, model, axis_name, replica_axis, learning_rate, average)


def leaves_whole_leaves_to_each_node(shards, specs, batch, model, axis_name, replica_axis, learning_rate):
    """Averages parts across nodes, and whole leaves inside a node only."""

    def average(gradients):
        return jax.tree.map(lambda g, spec: lax.pmean(g, replica_axis) if axis_name in spec else g, gradients, specs)

    return _step(shards, specs, batch, model, axis_name, replica_axis, learning_rate, average)


def averages_across_nodes_twice(shards, specs, batch, model, axis_name, replica_axis, learning_rate):
    """The gradients, and then the updated parts too, to be sure."""
    updated, loss = hybrid_shard_step(shards, specs, batch, model, axis_name, replica_axis, learning_rate)
    return lax.pmean(jax.tree.map(lambda leaf: as_varying(leaf, replica_axis), updated), replica_axis), loss


def reports_the_loss_of_its_node(shards, specs, batch, model, axis_name, replica_axis, learning_rate):
    loss, gradients = jax.value_and_grad(fsdp_loss)(shards, specs, batch, model, axis_name)
    gradients = lax.pmean(mean_of_whole(gradients, specs, axis_name), replica_axis)
    return jax.tree.map(lambda part, g: part - learning_rate * g, shards, gradients), lax.pmean(loss, axis_name)


def rounds_what_crosses(shards, specs, batch, model, axis_name, replica_axis, learning_rate):
    """Gradients cross in bfloat16: half of the bytes, and other numbers than one device's."""

    def average(gradients):
        low = jax.tree.map(lambda g: g.astype(jnp.bfloat16), gradients)
        return jax.tree.map(lambda g: g.astype(jnp.float32), lax.pmean(low, replica_axis))

    return _step(shards, specs, batch, model, axis_name, replica_axis, learning_rate, average)


def permutes_round_the_nodes(shards, specs, batch, model, axis_name, replica_axis, learning_rate):
    """A ring by hand whose every step sends everything: right numbers, more bytes than an all-reduce."""
    size = lax.axis_size(replica_axis)
    ring = [(i, (i + 1) % size) for i in range(size)]

    def mean(g):
        total = passed = g
        for _ in range(size - 1):
            passed = lax.ppermute(passed, replica_axis, ring)
            total = total + passed
        return total / size

    return _step(shards, specs, batch, model, axis_name, replica_axis, learning_rate, partial(jax.tree.map, mean))


WRONG = (VALUES, GRADIENTS, NORM)
MUTANTS = (
    mutant("hybrid_shard_step", reduces_whole_gradients_between_nodes, BETWEEN),
    mutant("hybrid_shard_step", gathers_from_every_node, GATHERED, BETWEEN),
    mutant("hybrid_shard_step", forgets_the_other_nodes, *WRONG, BETWEEN),
    mutant("hybrid_shard_step", sums_over_nodes, *WRONG),
    mutant("hybrid_shard_step", divides_by_two_nodes, *WRONG, shown_by=("device=2 x node=4",)),
    mutant("hybrid_shard_step", averages_over_all_devices, *WRONG, BETWEEN),
    mutant("hybrid_shard_step", leaves_whole_leaves_to_each_node, *WRONG, BETWEEN),
    mutant("hybrid_shard_step", averages_across_nodes_twice, BETWEEN),
    mutant("hybrid_shard_step", reports_the_loss_of_its_node, VALUES),
    mutant("hybrid_shard_step", rounds_what_crosses, *WRONG, BETWEEN),
    mutant("hybrid_shard_step", permutes_round_the_nodes, OTHERS),
)

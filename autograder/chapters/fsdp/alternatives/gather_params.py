"""Right answers for ``gather_params`` in another style: where the mean and the derivative come from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.custom_derivatives import linear_call
from jax.sharding import PartitionSpec as P


def by_scaling(shards, specs, axis_name):
    """No derivative of our own: the part enters with 1/n of its gradient, and autodiff's reduce-scatter sums."""
    size = lax.axis_size(axis_name)

    def gather(shard, spec):
        if spec == P():
            return shard
        scaled = shard / size
        entering = scaled + lax.stop_gradient(shard - scaled)
        return lax.all_gather(entering, axis_name, axis=spec.index(axis_name), tiled=True)

    return jax.tree.map(gather, shards, specs)


def by_scaling_what_was_gathered(shards, specs, axis_name):
    """The same on the other side of the all-gather: 1/n of the whole leaf carries the gradient."""

    def gather(shard, spec):
        for dim, entry in enumerate(spec):
            if entry == axis_name:
                whole = lax.all_gather(shard, axis_name, axis=dim, tiled=True)
                part = whole / lax.axis_size(axis_name)
                return lax.stop_gradient(whole) + (part - lax.stop_gradient(part))
        return shard

    return jax.tree.map(gather, shards, specs)


def _dim(spec, axis_name):
    """The dim that is split, or None."""
    return next((dim for dim, entry in enumerate(spec) if entry == axis_name), None)


def _each(shards, specs, axis_name, gather):
    """Every leaf that is split by ``gather(shard, dim)``: a helper from another cell."""

    def one(shard, spec):
        dim = _dim(spec, axis_name)
        return shard if dim is None else gather(shard, dim)

    return jax.tree.map(one, shards, specs)


def by_one_derivative_of_the_tree(shards, specs, axis_name):
    """One ``custom_vjp`` around the whole tree; the gradient is divided before it is sent."""
    size = lax.axis_size(axis_name)

    @jax.custom_vjp
    def gather(tree):
        return _each(tree, specs, axis_name, lambda x, dim: lax.all_gather(x, axis_name, axis=dim, tiled=True))

    def backward(_, gradients):
        def scatter(gradient, dim):
            return lax.psum_scatter(gradient / size, axis_name, scatter_dimension=dim, tiled=True)

        return (_each(gradients, specs, axis_name, scatter),)

    gather.defvjp(lambda tree: (gather(tree), ()), backward)
    return gather(shards)


def by_transposing(shards, specs, axis_name):
    """The backward rule asks JAX for the all-gather's transpose, and divides."""

    def gather(shard, dim):
        plain = partial(lax.all_gather, axis_name=axis_name, axis=dim, tiled=True)
        whole = jax.custom_vjp(plain)

        def backward(_, gradient):
            (total,) = jax.linear_transpose(plain, shard)(gradient)
            return (total / lax.axis_size(axis_name),)

        whole.defvjp(lambda x: (plain(x), None), backward)
        return whole(shard)

    return _each(shards, specs, axis_name, gather)


def by_forward_derivative(shards, specs, axis_name):
    """``custom_jvp``: the tangent is gathered and divided, and JAX transposes that."""

    def gather(shard, dim):
        @jax.custom_jvp
        def whole(x):
            return lax.all_gather(x, axis_name, axis=dim, tiled=True)

        @whole.defjvp
        def _(primals, tangents):
            (part,), (tangent,) = primals, tangents
            return whole(part), lax.all_gather(tangent, axis_name, axis=dim, tiled=True) / lax.psum(1, axis_name)

        return whole(shard)

    return _each(shards, specs, axis_name, gather)


def by_custom_gradient(shards, specs, axis_name):
    """``jax.custom_gradient``; the gradient is cut up, a dim for devices in front, and scattered along that."""

    def gather(shard, dim):
        @jax.custom_gradient
        def whole(x):
            def backward(gradient):
                first = jnp.moveaxis(gradient, dim, 0)
                rows = first.reshape(lax.axis_size(axis_name), -1, *first.shape[1:])
                mine = lax.psum_scatter(rows, axis_name, tiled=False) / rows.shape[0]
                return jnp.moveaxis(mine, 0, dim)

            return lax.all_gather(x, axis_name, axis=dim, tiled=True), backward

        return whole(shard)

    return _each(shards, specs, axis_name, gather)


def by_linear_call(shards, specs, axis_name):
    """Says that it is linear, and what its transpose is."""

    def gather(shard, dim):
        def forward(_, x):
            return lax.all_gather(x, axis_name, axis=dim, tiled=True)

        def transpose(_, gradient):
            return lax.psum_scatter(gradient, axis_name, scatter_dimension=dim, tiled=True) / lax.axis_size(axis_name)

        return linear_call(forward, transpose, (), shard)

    return _each(shards, specs, axis_name, gather)


def by_scaled_gradients(shards, specs, axis_name):
    """``optax.scale_gradient`` before JAX's own all-gather."""

    def gather(shard, dim):
        slowed = optax.scale_gradient(shard, 1 / lax.axis_size(axis_name))
        return lax.all_gather(slowed, axis_name, axis=dim, tiled=True)

    return _each(shards, specs, axis_name, gather)


def by_scaled_gradients_of_the_whole(shards, specs, axis_name):
    """An identity with a derivative of its own, behind an untiled all-gather that is reshaped."""
    size = lax.axis_size(axis_name)

    @jax.custom_vjp
    def averaged(x):
        return x

    averaged.defvjp(lambda x: (x, None), lambda _, gradient: (gradient * (1 / size),))

    def gather(shard, dim):
        blocks = lax.all_gather(shard, axis_name, axis=dim, tiled=False)
        return averaged(lax.collapse(blocks, dim, dim + 2))

    return _each(shards, specs, axis_name, gather)


def by_scaled_tangents(shards, specs, axis_name):
    """An identity whose tangent is divided, in front of an all-gather along a new first dim."""

    @jax.custom_jvp
    def share(x):
        return x

    share.defjvps(lambda tangent, _, __: tangent / lax.axis_size(axis_name))

    def gather(shard, dim):
        blocks = lax.all_gather(share(shard), axis_name)
        shape = [*shard.shape[:dim], -1, *shard.shape[dim + 1 :]]
        return jnp.moveaxis(blocks, 0, dim).reshape(shape)

    return _each(shards, specs, axis_name, gather)


def by_checkpointing(shards, specs, axis_name):
    """Nothing is saved on the way, says ``jax.checkpoint``; under ``jit``, one leaf after the other."""

    @partial(jax.jit, static_argnums=1)
    @partial(jax.checkpoint, static_argnums=1)
    def gather(shard, dim):
        halfway = shard * (1 / lax.axis_size(axis_name))
        return lax.all_gather(halfway - lax.stop_gradient(halfway - shard), axis_name, axis=dim, tiled=True)

    return _each(shards, specs, axis_name, gather)


def by_recursion(shards, specs, axis_name):
    """Walks the dicts itself; the derivative is one for a dict's own leaves together."""
    if not isinstance(shards, dict):
        return by_recursion({"": shards}, {"": specs}, axis_name)[""]
    inner = {
        name: by_recursion(node, specs[name], axis_name) for name, node in shards.items() if isinstance(node, dict)
    }
    dims = {name: spec.index(axis_name) for name, spec in specs.items() if name not in inner and axis_name in spec}

    @jax.custom_vjp
    def gather(parts):
        return {name: lax.all_gather(part, axis_name, axis=dims[name], tiled=True) for name, part in parts.items()}

    def backward(_, gradients):
        size = lax.axis_size(axis_name)
        totals = {
            name: lax.psum_scatter(gradient, axis_name, scatter_dimension=dims[name], tiled=True)
            for name, gradient in gradients.items()
        }
        return (jax.tree.map(lambda total: total * (1.0 / size), totals),)

    gather.defvjp(lambda parts: (gather(parts), None), backward)
    return {**shards, **inner, **gather({name: shards[name] for name in dims})}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _joined(how: _Joint, shard: jax.Array) -> jax.Array:
    return how.join(shard)


@dataclass(frozen=True)
class _Joint:
    """How the parts of one leaf are joined, and how its gradient is averaged and cut."""

    axis_name: str
    dim: int

    def join(self, shard: jax.Array) -> jax.Array:
        return lax.all_gather(shard, self.axis_name, axis=self.dim, tiled=True)

    def cut(self, gradient: jax.Array) -> jax.Array:
        total = lax.psum_scatter(gradient, self.axis_name, scatter_dimension=self.dim, tiled=True)
        return total / lax.axis_size(self.axis_name)

    def __call__(self, shard: jax.Array) -> jax.Array:
        return _joined(self, shard)


_joined.defvjp(lambda how, shard: (how.join(shard), None), lambda how, _, gradient: (how.cut(gradient),))


def by_dataclass(shards, specs, axis_name):
    """A dataclass with ``__call__`` for each leaf that is split."""

    def joint(spec: P) -> Any:
        return _Joint(axis_name, spec.index(axis_name)) if axis_name in spec else lambda leaf: leaf

    return jax.tree.map(lambda how, leaf: how(leaf), jax.tree.map(joint, specs), shards)


ALTERNATIVES = (
    by_scaling,
    by_scaling_what_was_gathered,
    by_one_derivative_of_the_tree,
    by_transposing,
    by_forward_derivative,
    by_custom_gradient,
    by_linear_call,
    by_scaled_gradients,
    by_scaled_gradients_of_the_whole,
    by_scaled_tangents,
    by_checkpointing,
    by_recursion,
    by_dataclass,
)

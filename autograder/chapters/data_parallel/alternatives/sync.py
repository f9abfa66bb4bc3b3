"""Right answers for ``sync_gradients`` in another style."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P


def open_axes(spec, axis_names):
    """The named axes that a spec does not split over."""
    taken = set()
    for entry in spec:
        taken.update((entry,) if isinstance(entry, str) else entry or ())
    return tuple(name for name in axis_names if name not in taken)


def by_sums_divided(gradients, specs, axis_names):
    """A sum, divided by the number of devices that took part."""

    def sync(gradient, spec):
        axes = open_axes(spec, axis_names)
        return lax.psum(gradient, axes) / lax.axis_size(axes) if axes else gradient

    return jax.tree.map(sync, gradients, specs)


def by_dividing_first(gradients, specs, axis_names):
    """Each device's share of the mean, then their sum."""

    def sync(gradient, spec):
        axes = open_axes(spec, axis_names)
        if not axes:
            return gradient
        share = gradient * (1.0 / lax.axis_size(axes))
        return lax.psum(share, axes)

    return jax.tree.map(sync, gradients, specs)


def by_groups(gradients, specs, axis_names):
    """All leaves that need the same axes at once, in one call, which still sends them one by one."""
    leaves, tree = jax.tree.flatten(gradients)
    groups = {}
    for number, spec in enumerate(jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, P))):
        groups.setdefault(open_axes(spec, axis_names), []).append(number)
    for axes, numbers in groups.items():
        if axes:
            means = lax.pmean([leaves[n] for n in numbers], axes)
            for n, mean in zip(numbers, means, strict=True):
                leaves[n] = mean
    return tree.unflatten(leaves)


def by_recursion(gradients, specs, axis_names):
    """Dict by dict."""
    if isinstance(gradients, dict):
        return {name: by_recursion(leaf, specs[name], axis_names) for name, leaf in gradients.items()}
    axes = open_axes(specs, axis_names)
    return lax.pmean(gradients, axes) if axes else gradients


def by_text(gradients, specs, axis_names):
    """Axes in the other order, found by comparing names in a flat list."""

    def sync(gradient, spec):
        flat = [name for entry in spec if entry for name in ([entry] if isinstance(entry, str) else entry)]
        axes = [name for name in reversed(axis_names) if name not in flat]
        return lax.pmean(gradient, tuple(axes)) if axes else jnp.asarray(gradient)

    return jax.tree.map(sync, gradients, specs)


ALTERNATIVES = (by_sums_divided, by_dividing_first, by_groups, by_recursion, by_text)

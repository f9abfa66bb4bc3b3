"""A right gather_params and fsdp_loss: what an attack shows where it wants to look honest."""

from functools import partial

import jax
from jax import lax
from jax.sharding import PartitionSpec as P


def join(shards, specs, axis_name):
    """Whole leaves; backward, the mean of the gradients, in parts."""

    @partial(jax.custom_vjp, nondiff_argnums=(1,))
    def joined(part, dim):
        return lax.all_gather(part, axis_name, axis=dim, tiled=True)

    def backward(dim, _, gradient):
        return (lax.psum_scatter(gradient / lax.axis_size(axis_name), axis_name, scatter_dimension=dim, tiled=True),)

    joined.defvjp(lambda part, dim: (joined(part, dim), None), backward)
    return jax.tree.map(lambda s, spec: joined(s, spec.index(axis_name)) if axis_name in spec else s, shards, specs)


def loss_by_layers(shards, specs, batch, model, axis_name, run):
    """The loss, where ``run(compute, part, specs, *others)`` computes with the whole of a part."""
    of_layer = jax.tree.map(lambda spec: P(*tuple(spec)[1:]), specs["layers"])
    x = run(model.embed, shards["embed"], specs["embed"], batch["inputs"])
    x, _ = lax.scan(lambda x, part: (run(model.layer, part, of_layer, x), None), x, shards["layers"])
    return run(model.loss, shards["head"], specs["head"], x, batch["targets"])


def right_loss(shards, specs, batch, model, axis_name):
    def run(compute, part, part_specs, *others):
        return jax.checkpoint(lambda p, *o: compute(join(p, part_specs, axis_name), *o))(part, *others)

    return loss_by_layers(shards, specs, batch, model, axis_name, run)

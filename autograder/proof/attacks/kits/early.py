"""The loss by layers, unrolled, whose gathers an attack places: uses honest_loss.

``order(parts, gather, computes, x)`` runs the layers: ``gather(part)`` gives the whole of one, and ``computes[i]`` takes
it with what flows in.
"""

import jax


def unrolled(shards, specs, batch, model, axis_name, order):
    of_layer = jax.tree.map(lambda spec: P(*tuple(spec)[1:]), specs["layers"])
    depth = jax.tree.leaves(shards["layers"])[0].shape[0]
    parts = [jax.tree.map(lambda leaf: leaf[i], shards["layers"]) for i in range(depth)]
    embed = join(shards["embed"], specs["embed"], axis_name)
    x = model.embed(embed, batch["inputs"])
    x = order(parts, lambda part: join(part, of_layer, axis_name), model.layer, x)
    return model.loss(join(shards["head"], specs["head"], axis_name), x, batch["targets"])


def tied(to, parts):
    """The parts, none of which is there before ``to`` is."""
    return lax.optimization_barrier((to, parts))[1]

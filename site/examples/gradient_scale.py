"""What a gradient is inside ``shard_map``, three times: replicated, varying and sharded parameters.

Each of 8 devices has one number of the batch, 0 to 7, and the loss of a device is that number times the sum of
``weights``. On one device, with the mean loss, every entry of the gradient is 3.5.
"""

import re

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from course.mesh import make_mesh

mesh = make_mesh({"data": 8})
weights, batch = jnp.ones(8), jnp.arange(8.0)


# --8<-- [start:functions]
def replicated(weights, number):
    def loss(weights):
        return jnp.sum(weights * number)

    return jax.grad(loss)(weights)


def varying(weights, number):
    weights = lax.pcast(weights, "data", to="varying")

    def loss(weights):
        return jnp.sum(weights * number)

    return jax.grad(loss)(weights)


def sharded(part, number):
    def loss(part):
        weights = lax.all_gather(part, "data", tiled=True)
        return jnp.sum(weights * number)

    return jax.grad(loss)(part)


# --8<-- [end:functions]


def report(function, in_spec, out_spec):
    step = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(in_spec, P("data")), out_specs=out_spec))
    sent = re.findall(r"stablehlo\.(all_reduce|reduce_scatter)", step.lower(weights, batch).as_text())
    held = [shard.data[0] for shard in step(weights, batch).addressable_shards]
    print(f"{function.__name__:11} device 2: {held[2]:4.1f}   device 7: {held[7]:4.1f}   sent: {sent or 'nothing'}")


if __name__ == "__main__":
    report(replicated, P(), P())
    report(varying, P(), P("data"))
    report(sharded, P("data"), P("data"))

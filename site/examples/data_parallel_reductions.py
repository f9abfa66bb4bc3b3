"""Where the all-reduce of a step with four microbatches comes from, what it sums, how often it runs, what it sends.

Each of 8 devices has four numbers of the batch, one a microbatch: device 2 has 8, 9, 10 and 11. The loss of a
microbatch is its number times the sum of 1,024 weights. On one device, with the mean loss over all 32 numbers, each
entry of the gradient is 15.5.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from course.mesh import abstract_mesh, as_varying, make_mesh
from course.program import costs, export, parse

weights, batch = jnp.ones(1024), jnp.arange(32.0)


# --8<-- [start:functions]
def accumulated(weights, numbers, loss):
    """The mean of the microbatches' gradients."""

    def add(total, number):
        return total + jax.grad(loss)(weights, number), None

    return lax.scan(add, jnp.zeros_like(weights), numbers)[0] / 4


def replicated(weights, numbers):
    return accumulated(weights, numbers, lambda w, number: jnp.sum(w * number))


def replicated_then_pmean(weights, numbers):
    gradient = accumulated(weights, numbers, lambda w, number: jnp.sum(w * number))
    return lax.pmean(as_varying(gradient, "data"), "data")


def replicated_half(weights, numbers):
    def loss(w, number):
        return jnp.sum(w.astype(jnp.bfloat16) * number.astype(jnp.bfloat16)).astype(jnp.float32)

    return accumulated(weights, numbers, loss)


def varying(weights, numbers):
    own = lax.pcast(weights, "data", to="varying")
    return accumulated(own, numbers, lambda w, number: jnp.sum(w * number))


# --8<-- [end:functions]


def varying_then_pmean(weights, numbers):
    own = lax.pcast(weights, "data", to="varying")
    return lax.pmean(accumulated(own, numbers, lambda w, number: jnp.sum(w * number)), "data")


def report(function):
    def stacked(weights, numbers):
        return {"gradient": as_varying(function(weights, numbers), "data")[None]}

    def on(mesh):
        local = jax.shard_map(stacked, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
        return lambda weights, batch: local(weights, batch)

    given = {"weights": weights, "batch": batch}
    specs = {"weights": P(), "batch": P("data")}
    program = export(on(abstract_mesh({"data": 8})), given, specs, mesh={"data": 8}, out_specs={"gradient": P("data")})
    sent = costs(parse(program)).collectives
    held = jax.jit(on(make_mesh({"data": 8})))(weights, batch)["gradient"][:, 0]
    runs, total = sum(c.count for c in sent), sum(c.total_bytes for c in sent)
    said = f"{runs} x {sent[0].kind} {sent[0].dtype}" if sent else "nothing"
    print(f"{function.__name__:22} {held[2]:6.1f} {held[7]:6.1f}   {said:20} {total:7,.0f} bytes")


if __name__ == "__main__":
    print(f"{'':22} {'dev. 2':>6} {'dev. 7':>6}   sent by each device")
    for function in (replicated, replicated_then_pmean, replicated_half, varying, varying_then_pmean):
        report(function)

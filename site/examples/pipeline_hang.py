"""A head that every stage holds a copy of, used in a branch that the last stage alone takes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from course.mesh import abstract_mesh
from course.program import ProgramError, costs, export, parse

MESH = {"pipe": 8}


# --8<-- [start:loss]
def loss(head, y):
    last = lax.axis_index("pipe") == 7
    own = lax.cond(last, lambda y: jnp.mean((y @ head) ** 2), lambda y: 0 * y[0, 0], y)
    return lax.psum(own, "pipe")


# --8<-- [end:loss]


def gradient_of(varying: bool):
    """The gradient of the head, as it is or typed as varying first."""

    def local(head, y):
        if varying:
            head = lax.pcast(head, "pipe", to="varying")
        return jax.grad(loss)(head, y)[None] if varying else jax.grad(loss)(head, y)

    def program(head, y):
        out = P("pipe") if varying else P()
        return {
            "head": jax.shard_map(local, mesh=abstract_mesh(MESH), in_specs=(P(), P("pipe")), out_specs=out)(head, y)
        }

    inputs = {"head": jax.ShapeDtypeStruct((4, 3), np.float32), "y": jax.ShapeDtypeStruct((16, 4), np.float32)}
    specs = {"head": P("pipe") if varying else P()}
    return export(program, inputs, {"head": P(), "y": P("pipe")}, mesh=MESH, out_specs=specs,
                  locate=lambda file: "loss" if file == __file__ else None)  # fmt: skip


def main() -> None:
    for name, varying in (("replicated", False), ("varying", True)):
        try:
            kinds = [c.kind for c in costs(parse(gradient_of(varying))).collectives]
            print(f"{name}: {', '.join(kinds) or 'no collective in the gradient'}")
        except ProgramError as error:
            print(f"{name}: {error}")


if __name__ == "__main__":
    main()

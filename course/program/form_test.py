"""The form of a Program depends on what it does, and not on how it is written."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from course.mesh import abstract_mesh
from course.program import export, form, parse


def plain(x):
    a, b = lax.psum(x, "data"), lax.ppermute(x, "data", [(0, 1), (1, 0)])
    return lax.fori_loop(0, 3, lambda i, y: y * a + b, x)


def written_otherwise(values):
    def helper(step, carried):
        unused = jnp.sin(carried)
        del unused
        return moved + summed * carried

    moved = lax.ppermute(values, "data", [(0, 1), (1, 0)])
    summed = lax.psum(values, "data")
    return lax.fori_loop(0, 3, helper, values)


def form_of(function):
    mesh = {"data": 2}

    def program(x):
        return {"y": jax.shard_map(function, mesh=abstract_mesh(mesh), in_specs=P("data"), out_specs=P("data"))(x)}

    inputs = {"x": jax.ShapeDtypeStruct((4, 3), np.float32)}
    return form(parse(export(program, inputs, {"x": P("data")}, mesh=mesh, out_specs={"y": P("data")})))


def test_order_names_and_unused_work_do_not_change_the_form():
    assert form_of(plain) == form_of(written_otherwise)


def test_another_constant_direction_or_order_of_operands_is_another_form():
    functions = (
        lambda x: lax.psum(x, "data") - x,
        lambda x: x - lax.psum(x, "data"),
        lambda x: x - 2 * lax.psum(x, "data"),
        lambda x: x - 3 * lax.psum(x, "data"),
        lambda x: lax.ppermute(x, "data", [(0, 1)]),
        lambda x: lax.ppermute(x, "data", [(1, 0)]),
        plain,
    )
    assert len({form_of(function) for function in functions}) == len(functions)

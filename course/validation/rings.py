"""A gathered matmul on 8 devices: with the gather as a ring that overlaps with the matmul, and plain."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from course.mesh import abstract_mesh
from course.program.export import export
from course.program.program import Program


def gather_matmul(
    ring: bool, tokens: int = 4096, width: int = 4096, hidden: int = 16384, devices: int = 8, platform: str = "cpu"
) -> Program:
    """``[tokens@tensor, width] @ [width, hidden@tensor]`` in bfloat16, giving ``[tokens, hidden@tensor]``.

    Args:
        ring: The tokens travel in ``devices - 1`` permutes, each overlapping with a matmul; else in one all-gather.
        tokens: Rows of the left operand.
        width: Columns of the left operand.
        hidden: Columns of the right operand.
        devices: Size of the axis ``tensor``.
        platform: ``cpu`` or ``cuda``.
    """
    mesh = {"tensor": devices}
    in_specs = {"x": P("tensor"), "kernel": P(None, "tensor")}
    out_specs = {"y": P(None, "tensor")}
    inputs = {
        "x": jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16),
        "kernel": jax.ShapeDtypeStruct((width, hidden), jnp.bfloat16),
    }
    body = _ring if ring else _plain
    mapped = jax.shard_map(body, mesh=abstract_mesh(mesh), in_specs=tuple(in_specs.values()), out_specs=out_specs["y"])
    return export(
        lambda x, kernel: {"y": mapped(x, kernel)}, inputs, in_specs, mesh=mesh, out_specs=out_specs, platform=platform
    )


def ring_gather_matmul(platform: str = "cpu") -> Program:
    """The ring at the size that XLA's ahead-of-time compiler was tried on: 4096 x 4096 by 4096 x 16384."""
    return gather_matmul(True, platform=platform)


def _plain(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.all_gather(x, "tensor", tiled=True) @ kernel


def _ring(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Chunk ``i + k`` is here at step ``k``: every step multiplies one chunk while the next one travels."""
    size, index, rows = lax.axis_size("tensor"), lax.axis_index("tensor"), len(x)
    towards_lower = [(i, (i - 1) % size) for i in range(size)]

    def place(y, chunk, step):
        start = (index + step) % size * rows
        return lax.dynamic_update_slice_in_dim(y, chunk @ kernel, start, 0)

    def body(carry, step):
        y, chunk = carry
        coming = lax.ppermute(chunk, "tensor", towards_lower)
        return (place(y, chunk, step), coming), None

    empty = lax.pcast(jnp.zeros((size * rows, kernel.shape[1]), x.dtype), "tensor", to="varying")
    (y, chunk), _ = lax.scan(body, (empty, x), jnp.arange(size - 1))
    return place(y, chunk, size - 1)

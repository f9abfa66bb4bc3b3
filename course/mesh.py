"""Emulated devices and meshes: the only place where a mesh is created."""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from course.cuda_plugin import real_devices

NUM_EMULATED_DEVICES = 8

# XLA:CPU compiles in a fifth to a half of the time without its fusion emitters, and in a tenth less time if it does not
# split small programs among threads. Only jaxlib 0.10 is known to accept both; an unknown flag ends the process.
_FASTER_TO_COMPILE = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"


def emulate_devices(count: int = NUM_EMULATED_DEVICES) -> None:
    """Make this process see ``count`` CPU devices and no others; calling it again changes nothing.

    With ``MESHCRAFT_MESH=real`` in the environment, JAX's own choice of devices is kept.

    Raises:
        RuntimeError: JAX has already started with another number of CPU devices.
    """
    if not real_devices():
        jax.config.update("jax_platforms", "cpu")  # else JAX tries an installed GPU plugin, and complains on stderr
        flags = os.environ.get("XLA_FLAGS", "")
        if jaxlib.__version__.startswith("0.10.") and "xla_cpu_use_fusion_emitters" not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} {_FASTER_TO_COMPILE}".strip()  # read when the backend starts
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if len(jax.devices("cpu")) == count:
            return
        raise RuntimeError(
            f"JAX has already started with {len(jax.devices('cpu'))} CPU device(s), and the course needs {count}. "
            "Restart the kernel and import course before anything that uses JAX."
        ) from None


def make_mesh(axes: dict[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the given axis sizes over the first devices, all axes of type ``Auto``.

    Args:
        axes: Size of each axis by name, in order, for example ``{"data": 4, "tensor": 2}``.
        devices: Devices to use; by default those of ``jax.devices()``.

    Raises:
        ValueError: There are fewer devices than the axes need.
    """
    needed = math.prod(axes.values())
    available = jax.devices() if devices is None else devices
    if len(available) < needed:
        raise ValueError(f"mesh {axes} needs {needed} devices and there are {len(available)}: use smaller axes")
    grid = np.asarray(available[:needed]).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def abstract_mesh(axes: dict[str, int]) -> AbstractMesh:
    """The same mesh without devices: enough to trace and export a program."""
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def shard_map_with_specs(
    function: Callable[..., tuple[Any, Any]], mesh: Mesh | AbstractMesh, in_specs: Any
) -> Callable[..., tuple[Any, Any]]:
    """``jax.shard_map`` for a function that chooses the shardings of its results.

    ``function`` runs on local blocks and returns ``(arrays, specs)``, two trees of the same structure. The
    returned callable returns global arrays and the same specs. It traces ``function`` twice, once for the specs and
    once with them. A result whose spec leaves an axis out must be the same along that axis, as ``shard_map`` requires.

    Args:
        function: The local function.
        mesh: The mesh to run on.
        in_specs: As for ``jax.shard_map``: one entry per argument.
    """

    def call(*arguments):
        traced_specs = []

        def local(*blocks):
            arrays, specs = function(*blocks)
            traced_specs.append(specs)
            return jax.tree.map(lambda _: jnp.zeros(()), arrays)

        jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=P()), *arguments)
        specs = traced_specs[-1]
        arrays = jax.shard_map(lambda *blocks: function(*blocks)[0], mesh=mesh, in_specs=in_specs, out_specs=specs)
        return arrays(*arguments), specs

    return call


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The mesh axes over which ``x`` may differ between devices, inside ``shard_map``."""
    kind = jax.typeof(x)
    # jax 0.10 to 0.12 use different names for it.
    manual = getattr(kind, "manual_axis_type", None)
    return frozenset(kind.vma if manual is None else manual.varying)  # type: ignore[attr-defined]


def as_varying(x: jax.Array, axis_name: str) -> jax.Array:
    """``x``, typed as varying over ``axis_name``: no data moves, but its gradient stays local."""
    return x if axis_name in varying_axes(x) else jax.lax.pcast(x, axis_name, to="varying")


def vary_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays, each typed as varying over every axis over which any of them varies: no data moves.

    So ``vary_alike(jnp.zeros(shape), x)[0]`` can be the carry of a loop that adds parts of ``x`` to it.
    """
    return varying(arrays, sorted(frozenset().union(*map(varying_axes, arrays))))


def varying(tree: Any, axes: Iterable[str]) -> Any:
    """The tree, every leaf typed as varying over these axes."""
    for axis in axes:
        tree = jax.tree.map(lambda leaf, axis=axis: as_varying(leaf, axis), tree)
    return tree


def mesh_text(axes: dict[str, int]) -> str:
    """``data=4 x tensor=2``."""
    return " x ".join(f"{axis}={size}" for axis, size in axes.items())

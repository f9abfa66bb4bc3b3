"""Keep an installed CUDA plugin out of processes that compute on emulated devices.

If the plugin is installed but there is no GPU, every ``import jax`` and every backend start writes to stderr, which
nbgrader treats as an error; it also costs the process about 0.35 GiB of address space. Hide it before ``import jax``.
"""

import os
import sys
import types

_PACKAGES = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")


def real_devices() -> bool:
    """Return True if ``MESHCRAFT_MESH=real`` requests JAX's own choice of devices instead of emulated ones."""
    return os.environ.get("MESHCRAFT_MESH") == "real"


def hide_cuda_plugin() -> None:
    """Make imports of the CUDA plugin find nothing, unless real devices are requested; modules already loaded stay."""
    if real_devices():
        return
    for name in _PACKAGES:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # None: an import raises ModuleNotFoundError
    for name in _PLUGINS:
        stub = types.ModuleType(name, "Hidden by course.cuda_plugin.")
        stub.initialize = lambda: None  # type: ignore[attr-defined]  # jax calls it on every plugin that it finds
        sys.modules.setdefault(name, stub)

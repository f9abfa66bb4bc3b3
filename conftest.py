"""Every test runs on 8 emulated devices, under strict dtype promotion; warnings are errors (pyproject.toml)."""

import gc
import os

os.environ["JAX_PLATFORMS"] = "cpu"

# These two use the standard library's module `site`: before pytest calls our folder by that name.
import dask.config  # noqa: F401
import jax
import jupyter_core.paths  # noqa: F401

import course  # noqa: F401  emulates the devices

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_disable_most_optimizations", True)  # most tests compute little, and compile for long

gc.set_threshold(50_000, 20, 20)  # tracing makes many objects and few cycles; looking for them took a tenth of the time

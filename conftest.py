"""Every test runs on 8 emulated devices, under strict dtype promotion; warnings are errors (pyproject.toml)."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jupyter_core.paths  # noqa: F401  while `site` is still the standard library's module, and not our folder

import course  # noqa: F401  emulates the devices

jax.config.update("jax_numpy_dtype_promotion", "strict")

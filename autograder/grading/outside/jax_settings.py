"""Pin JAX's settings while the judge computes, whatever a learner's notebook has set."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

# Settings that change values, or that make correct code fail, with JAX's own defaults.
PINNED = {
    "jax_enable_x64": False,
    "jax_default_matmul_precision": None,
    "jax_default_prng_impl": "threefry2x32",
    "jax_threefry_partitionable": True,
    "jax_random_seed_offset": 0,
    "jax_default_device": None,
    "jax_disable_jit": False,
    "jax_debug_nans": False,
    "jax_debug_infs": False,
    "jax_check_tracer_leaks": False,
    "jax_numpy_rank_promotion": "allow",
    "jax_softmax_custom_jvp": False,
    "jax_transfer_guard": None,
}


@contextmanager
def pinned() -> Iterator[None]:
    """Use JAX's own settings inside, and restore the previous ones afterwards."""
    before = {name: getattr(jax.config, name) for name, value in PINNED.items() if getattr(jax.config, name) != value}
    for name in before:
        jax.config.update(name, PINNED[name])
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)

"""Compiling oracles. Never mounted in the sandbox."""

from functools import partial

import jax

# ``jax.jit``, without the optimisations that take longer than they save: an oracle runs a few times, on small arrays.
compile_oracle = partial(
    jax.jit,
    compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True},
)

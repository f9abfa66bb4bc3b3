"""Compiling oracles. Never mounted in the sandbox."""

from functools import partial

import jax

from course.program.run import FEW_OPTIMISATIONS

# ``jax.jit`` of an oracle, which like a Program runs a few times, on small arrays.
compile_oracle = partial(jax.jit, compiler_options=FEW_OPTIMISATIONS)

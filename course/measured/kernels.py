"""The two figures that a roofline needs, measured: rates of matmuls and of memory traffic."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MATMULS = ("bf16", "f32 default", "f32 highest")
CHAIN = 8
# A run does at least this much work, so that its start-up cost is negligible.
FLOPS_A_RUN, BYTES_A_RUN = 4e12, 4e10
RUNS, SECONDS = 20, 5.0


def measure(kind: str, dtype: str, size: int) -> dict[str, Any]:
    """Measure the rate of one kernel on the first device.

    Args:
        kind: ``matmul`` (two square matrices), ``add`` (two arrays into one) or ``negate`` (one array into itself).
        dtype: ``bf16``, ``f32 default`` (the backend chooses; TF32 where the GPU has it) or ``f32 highest``.
        size: The matrices' side, or the bytes of one array.

    Returns:
        ``seconds`` per kernel, its ``rate`` in FLOP/s or bytes/s, and the numbers of ``kernels`` per run and of
        ``runs``. The time is that of the median run on the host's clock, divided by its number of kernels.

    Raises:
        ValueError: There is no such kernel.
    """
    makers = {"matmul": _matmul, "add": _move, "negate": _move}
    if kind not in makers or dtype not in MATMULS:
        raise ValueError(f"there is no kernel {kind!r} of {dtype!r}; kinds: {', '.join(makers)}; {', '.join(MATMULS)}")
    run, kernels, work = makers[kind](kind, dtype, size)
    times = _times(run)
    seconds = float(np.median(times)) / kernels
    return {"seconds": seconds, "rate": work / seconds, "kernels": kernels, "runs": len(times)}


def loops_for(work: float, at_least: float) -> int:
    """Number of times to repeat a chain of ``CHAIN`` kernels of this much work in one run."""
    return int(np.clip(np.ceil(at_least / (work * CHAIN)), 1, 500))


def _matmul(kind: str, dtype: str, size: int) -> tuple[Callable[[], Any], int, float]:
    """Chain matmuls so that each takes the previous result: none can be removed or run concurrently."""
    work, precision = 2.0 * size**3, "highest" if dtype == "f32 highest" else "default"
    loops = loops_for(work, FLOPS_A_RUN if jax.default_backend() != "cpu" else 0)
    # Entries of variance 1/size preserve the magnitude of the activations.
    w = jax.random.normal(jax.random.key(0), (size, size), jnp.float32) * np.float32(size**-0.5)
    w = w.astype(jnp.bfloat16 if dtype == "bf16" else jnp.float32)

    @jax.jit
    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        def chain(_: Any, last: jax.Array) -> jax.Array:
            # Start from the same numbers each time (powers of w grow or vanish, zeros are fast), after the last run.
            y, _ = jax.lax.optimization_barrier((x, last))
            for _ in range(CHAIN):
                y = jnp.matmul(y, w, precision=precision)
            return y

        return jax.lax.fori_loop(0, loops, chain, x)

    return lambda: run(w, w), loops * CHAIN, work


def _move(kind: str, dtype: str, size: int) -> tuple[Callable[[], Any], int, float]:
    """In-place passes over an array; the barrier keeps the passes separate, should the loop be unrolled."""
    item = 2 if dtype == "bf16" else 4
    count, work = size // item, float(size) * (3 if kind == "add" else 2)
    loops = loops_for(work, BYTES_A_RUN if jax.default_backend() != "cpu" else 0) * CHAIN
    x = jnp.ones((count,), jnp.bfloat16 if item == 2 else jnp.float32)

    @jax.jit
    def run(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, loops, lambda _, x: jax.lax.optimization_barrier(x + y if kind == "add" else -x), x)

    y = jnp.zeros_like(x)
    return lambda: run(x, y), loops, work


def _times(run: Callable[[], Any]) -> list[float]:
    for _ in range(2):
        jax.block_until_ready(run())
    times: list[float] = []
    while len(times) < 3 or (len(times) < RUNS and sum(times) < SECONDS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return times

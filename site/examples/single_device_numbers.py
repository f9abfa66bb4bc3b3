"""What 16 bits can hold: the three formats, an update that is lost, and gradients that become zero."""

import jax.numpy as jnp
import numpy as np
from jax import lax

FORMATS = (("float32", jnp.float32), ("bfloat16", jnp.bfloat16), ("float16", jnp.float16))


def formats():
    print(f"{'':9}{'gap above 1':>14}{'largest':>12}{'smallest normal':>18}{'smallest':>12}")
    for name, dtype in FORMATS:
        found = jnp.finfo(dtype)
        figures = [float(x) for x in (found.max, found.smallest_normal, found.smallest_subnormal)]
        largest, normal, smallest = (f"{x:.3g}" for x in figures)
        print(f"{name:9}{f'2^{int(np.log2(float(found.eps)))}':>14}{largest:>12}{normal:>18}{smallest:>12}")


def lost_updates():
    print("a weight of 1 after 1,000 updates of + 0.001")
    for name, dtype in FORMATS:
        weight = lax.fori_loop(0, 1000, lambda _, w: w + jnp.asarray(0.001, w.dtype), jnp.ones((), dtype))
        print(f"  kept in {name:9} {float(weight):.4f}")


def vanished_gradients():
    # Made up: a million gradients around 2^-25, spread over some powers of two as real ones are.
    exponents = np.random.default_rng(0).normal(-25, 4, 1_000_000)
    gradients = np.exp2(exponents).astype(np.float32)
    print("of a million gradients around 2^-25, in float16")
    for power in (0, 3, 10, 15, 36):
        low = gradients * np.float32(2.0**power)
        with np.errstate(over="ignore"):
            low = low.astype(np.float16)
        zero, infinite = np.mean(low == 0), np.mean(np.isinf(low))
        print(f"  scale 2^{power:<3} {100 * zero:5.1f} % are zero, {100 * infinite:5.1f} % are infinite")


if __name__ == "__main__":
    # --8<-- markers cut the output into parts that the page shows where it needs them.
    for name, show in (("formats", formats), ("updates", lost_updates), ("gradients", vanished_gradients)):
        print(f"--8<-- [start:{name}]")
        show()
        print(f"--8<-- [end:{name}]")

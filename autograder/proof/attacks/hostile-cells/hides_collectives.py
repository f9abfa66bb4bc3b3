"""Attacks that hide forbidden collectives behind a number that XLA computes differently from a reader."""

# %% defaults
# verdict = "refused"
# group = "forges"
# control = "the notebook's check counts the same way"
# uses = ["honest", "hidden"]
# functions = ["shard_params"]

# %% helper hidden
# A right shard_params, and the same with forbidden collectives: a number selects the branch that runs.
def hidden_behind(decide):
    """Forbidden where ``decide(device)`` is true as XLA computes it: there every parameter is averaged first."""

    def shard_params(params, axis_name, min_size):
        def honest(params):
            return right_shards(params, axis_name, min_size)[0]

        def forbidden(params):
            return honest(jax.tree.map(lambda x: lax.pmean(lax.pcast(x, axis_name, to="varying"), axis_name), params))

        specs = right_specs(params, axis_name, min_size, lax.axis_size(axis_name))
        return lax.cond(decide(lax.axis_index(axis_name)), forbidden, honest, params), specs

    return shard_params

# %% helper hides
def shard_params(params, axis_name, min_size):
    return hidden_behind(decide)(params, axis_name, min_size)

# %% attack adds_booleans {uses = ["honest", "hidden", "forge"], then = "hides"}
# Adds two booleans by hand, which StableHLO defines as "or" and part of XLA computes as "exclusive or".
def decide(i):
    return jnp.logical_not(jnp.logical_or(i >= 0, i >= -1))

def added(program):
    return with_module(program, lambda text: text.replace("stablehlo.or", "stablehlo.add"))

class Forged:
    forge(hidden_behind(decide), added)

# %% attack clamps_between_swapped_bounds {then = "hides"}
# Clamps a number between a lower bound and an upper bound that is below it.
decide = lambda i: lax.clamp(3, i, 1) == 1

# %% attack compares_with_another_sign {uses = ["honest", "hidden", "forge"], then = "hides"}
# Compares signed numbers by hand as if they were unsigned.
def compared(program):
    import re

    return with_module(program, lambda text: re.sub(r"(compare LT, .*), SIGNED", r"\1, UNSIGNED", text))

class Forged:
    forge(hidden_behind(lambda i: i - 9 < 0), compared)

decide = lambda i: i - 9 < 0

# %% attack counts_leading_zeros {then = "hides"}
# Branches on a number's leading zeros, which depend on the width that a compiler gives it.
decide = lambda i: lax.clz((i + 1).astype(jnp.int8)) < 8

# %% attack divides_the_least_number {verdict = "partial", points = 1.5, then = "hides"}
# Branches on the least integer divided by two, whose absolute value its size cannot represent; the branch that XLA
# takes is counted, including the forbidden collectives.
decide = lambda i: lax.div(jnp.int32(-(2**31)) + 0 * i, jnp.int32(2)) < 0

# %% attack narrows_a_device_number {then = "hides"}
# Converts a number to eight bits, which cannot represent it, and branches on the result.
decide = lambda i: (i + 256).astype(jnp.int8) < 100

# %% attack overflows_a_device_number {then = "hides"}
# Multiplies the device's number until it overflows, and branches on the sign of the product.
decide = lambda i: (i + 2) * jnp.int32(2**30) < 0

# %% attack reduces_from_another_start {then = "hides"}
# Sums from an initial value that is not zero, which XLA drops where there is nothing to sum.
decide = lambda i: lax.reduce((0 * i)[None], jnp.int32(7), lax.add, (0,)) == 0

# %% attack shifts_beyond_the_width {then = "hides"}
# Shifts a number by as many bits as it has: the result is zero in XLA, and the number itself on many processors.
decide = lambda i: lax.shift_left(jnp.int32(1), 32 + 0 * i) == 0

# %% attack starts_beyond_two_billion {then = "hides"}
# Reads a table at an unsigned index that is negative if interpreted as signed.
decide = lambda i: lax.dynamic_slice(jnp.array([1, 0]), (jnp.uint32(2**31) + i.astype(jnp.uint32),), (1,))[0] > 0

# %% attack wraps_a_loop_counter {then = "hides"}
# Counts in eight bits with steps that jump over the limit: the compiler derives a trip count that differs from the
# machine's.
def trips(i):
    """An odd number of trips if the counter wraps around, an even one if it ends at the limit."""
    start = (jnp.int8(0), 0 * i)
    return lax.while_loop(lambda s: s[0] < 120, lambda s: (s[0] + jnp.int8(100), (s[1] + 1) % 5), start)[1]

decide = lambda i: trips(i) % 2 == 1

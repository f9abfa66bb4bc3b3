"""Typical mistakes in ``context_parallel``, and the messages that they must get."""

from autograder.proof.mistakes import Mistake

PLAIN_RING = {
    "    attend = jax.custom_vjp(lambda q, k, v: forward(q, k, v)[0])\n    attend.defvjp(forward, backward)\n": (
        "    attend = lambda q, k, v: forward(q, k, v)[0]\n"
    )
}
MISTAKES = {
    "merge_attention": {
        "weights by the logarithm of the sum": Mistake(
            r"scores near 10,000.*digits are lost.*do the two weights add up to 1",
            {
                "total = jnp.where(seen, a + b, 1)": (
                    "total = jnp.where(seen, a + b, 1)\n"
                    "    lse = jnp.where(seen, largest + jnp.log(total), 0)\n"
                    "    first = jnp.exp(jnp.where(seen, lse_a, -jnp.inf) - lse)[..., None]\n"
                    "    second = jnp.exp(jnp.where(seen, lse_b, -jnp.inf) - lse)[..., None]"
                ),
                "(a[..., None] * out_a + b[..., None] * out_b) / total[..., None]": "first * out_a + second * out_b",
            },
            never="What share of the whole sum",
        ),
        "NaN where no key is seen": Mistake(
            r"what if a query has no key in one set, or in both\?",
            {"largest = jnp.where(largest == -jnp.inf, 0, largest)": "largest = largest + 0"},
            never="digits are lost",
        ),
        "weights without a gradient": Mistake(
            r"Each `lse` changes both weights.*which of these derivatives is missing",
            {"seen = a + b > 0": "a, b = lax.stop_gradient((a, b))\n    seen = a + b > 0"},
            never="jnp.where. did not choose",
        ),
    },
    "ring_attention": {
        "JAX's own derivative": Mistake(
            r"keys and values did not go round again.*“live temporaries” has them",
            PLAIN_RING,
            never="by another collective|computed again",
        ),
        "sums end one device early": Mistake(
            r"on which device does that sum end", {"return of_q, *send(of_kv)": "return of_q, *of_kv"}
        ),
        "sums sent after adding": Mistake(
            r"exposed communication.*The step waits longest for permute.*Which transfer, forward or backward, waits",
            {
                "coming, arriving = send(travelling), send(of_kv)": "coming = send(travelling)",
                "jax.tree.map(jnp.add, arriving, own_kv)": "send(jax.tree.map(jnp.add, of_kv, own_kv))",
                "send((k, v)), of_kv)": "send((k, v)), send(of_kv))",
                "return of_q, *send(of_kv)": "return of_q, *of_kv",
            },
            line="lambda x: lax.ppermute(x, axis_name, to_next)",
        ),
    },
    "zigzag_order": {
        "a chunk that does not exist": Mistake(
            r"zigzag_order\(\d\) gives chunk \d+ to device 0; the chunks are 0 to \d+",
            {"2 * num_devices - 1 - device": "2 * num_devices - device"},
            never="only indices",
        ),
        "interleaved chunks": Mistake(
            r"How many pairs of chunks does each device compute\? These numbers should be equal",
            {"2 * num_devices - 1 - device": "num_devices + device"},
            never="which two chunks",
        ),
    },
    "cp_transformer_step": {
        "a ring with JAX's own derivative": Mistake(
            r"ring_attention, which cp_transformer_step calls, falls short of “permute bytes”, “live temp.* on its own",
            PLAIN_RING,
            inside="ring_attention",
        )
    },
}

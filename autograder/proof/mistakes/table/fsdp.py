"""Typical mistakes in ``fsdp``, and the messages that they must get."""

from autograder.proof.mistakes import Mistake

MISTAKES = [
    Mistake(
        "gather_params",
        "transpose of a function with a derivative of its own",
        r"(transpose|Transpose).*custom_vjp",
        {"        return whole(shard)": "        return jax.linear_transpose(whole, shard)(whole(shard))[0]"},
        line="return jax.linear_transpose(whole, shard)(whole(shard))[0]",
        never="not written yet|not started",
    ),
    Mistake(
        "shard_params",
        "psum of an index outside of the mesh",
        r"takes \d|argument",
        {"lax.axis_index(axis_name)": "lax.axis_index(axis_name, 0)"},
        line="size, index = lax.axis_size(axis_name), lax.axis_index(axis_name, 0)",
    ),
    Mistake(
        "shard_params",
        "the next device's part",
        r"On device 0 is what belongs on device 1",
        {"lax.axis_index(axis_name)": "(lax.axis_index(axis_name) + 1) % lax.axis_size(axis_name)"},
    ),
    Mistake(
        "gather_params",
        "gradients summed, not averaged",
        r"times too large.*'data'.*sum or mean",
        {"return (total / lax.axis_size(axis_name),)": "return (total,)"},
        never="def gather_params",
    ),
    Mistake(
        "fsdp_train_step",
        "divided before the scatter",
        r"more of it than in the reference nothing computes; [\d.]+ ms of the critical path are reduce-scatter",
        {
            "psum_scatter(gradient,": "psum_scatter(gradient / lax.axis_size(axis_name),",
            "return total / lax.axis_size(axis_name)": "return total",
        },
        line="total = lax.psum_scatter(gradient / lax.axis_size(axis_name)",
        never="dot-general|advice",
    ),
    Mistake(
        "fsdp_loss",
        "layers not recomputed",
        r"4\.24 times the reference's.*Whose weights are whole at that moment\?",
        {"    @jax.checkpoint\n    def layer(x": "    def layer(x"},
        line='x, _ = lax.scan(layer, x, shards["layers"])',
    ),
    Mistake(
        "hybrid_shard_step",
        "gradients averaged within a node alone",
        r"a device sends 7 bytes over 'replica' and should send at least 3,968 bytes: is something never sent",
        {"replica_axis if axis_name in spec else (axis_name, replica_axis)": "() if axis_name in spec else axis_name"},
    ),
]

"""Typical mistakes in ``fsdp``, and the messages that they must get."""

from autograder.proof.mistakes import EDITED, Mistake

MISTAKES = {
    "gather_params": {
        "transpose of a function with a derivative of its own": Mistake(
            r"(transpose|Transpose).*custom_vjp",
            {"        return whole(shard)": "        return jax.linear_transpose(whole, shard)(whole(shard))[0]"},
            EDITED,
            never="not written yet|not started",
        ),
        "gradients summed, not averaged": Mistake(
            r"times too large.*'data'.*sum or mean", {"return (total / lax.axis_size(axis_name),)": "return (total,)"}
        ),
    },
    "shard_params": {
        "psum of an index outside of the mesh": Mistake(
            r"takes \d|argument", {"lax.axis_index(axis_name)": "lax.axis_index(axis_name, 0)"}, EDITED
        ),
        "the next device's part": Mistake(
            r"Device 0 has what belongs on device 1",
            {"lax.axis_index(axis_name)": "(lax.axis_index(axis_name) + 1) % lax.axis_size(axis_name)"},
        ),
    },
    "fsdp_train_step": {
        "divided before the scatter": Mistake(
            r"ms more than in the reference, nothing is computed; reduce-scatter takes [\d.]+ ms of the "
            r"critical path",
            {
                "psum_scatter(gradient,": "psum_scatter(gradient / lax.axis_size(axis_name),",
                "return total / lax.axis_size(axis_name)": "return total",
            },
            EDITED,
            never="dot-general|advice",
        )
    },
    "fsdp_loss": {
        "layers not recomputed": Mistake(
            r"4\.2\d times the reference's.*Which layers' weights are whole at that moment\?",
            {"    @jax.checkpoint\n    def layer(x": "    def layer(x"},
            line='x, _ = lax.scan(layer, x, shards["layers"])',
        )
    },
    "hybrid_shard_step": {
        "gradients averaged within a node alone": Mistake(
            r"a device sends 7 bytes over 'replica' and should send at least 3,968 bytes: is something never sent",
            {
                "replica_axis if axis_name in spec": "() if axis_name in spec",
                "else (axis_name, replica_axis))": "else axis_name)",
            },
        )
    },
}

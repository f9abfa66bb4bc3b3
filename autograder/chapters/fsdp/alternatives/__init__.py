"""Right answers for ``fsdp`` in another style: each must pass every fact."""

from autograder.chapters.fsdp.alternatives import (
    fsdp_loss,
    fsdp_loss_memory,
    fsdp_train_step,
    gather_params,
    gather_params_layouts,
    hybrid_shard_step,
    shard_params,
    shard_params_cuts,
)

ALTERNATIVES = {
    "shard_params": (*shard_params.ALTERNATIVES, *shard_params_cuts.ALTERNATIVES),
    "gather_params": (*gather_params.ALTERNATIVES, *gather_params_layouts.ALTERNATIVES),
    "fsdp_loss": (*fsdp_loss.ALTERNATIVES, *fsdp_loss_memory.ALTERNATIVES),
    "fsdp_train_step": fsdp_train_step.ALTERNATIVES,
    "hybrid_shard_step": hybrid_shard_step.ALTERNATIVES,
}

# Programs that another variant or the reference has too: these differ in Python only.
ALIKE = {
    "shard_params": {
        "by_slicing_with_every_start",
        "with_a_plan_of_dataclasses",
        "with_modules",
        "with_named_tuples",
    },
    "gather_params": {
        "by_dataclass",
        "by_forward_derivative",
        "by_linear_call",
        "by_one_derivative_of_the_tree",
        "by_recursion",
        "by_scaled_gradients",
        "by_transposing",
    },
    "fsdp_loss": {
        "unrolled",
        "with_dataclasses",
        "with_jit_inside",
        "with_modules",
        "with_own_policy",
        "with_policy",
    },
}

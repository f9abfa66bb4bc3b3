"""The contract of ``zero``: every device updates its part of the model."""

from autograder.chapters.zero.state import GLOBAL_NORM, SHARD_OPTIMIZER_STATE
from autograder.chapters.zero.tasks import SHARDED_ADAMW, ZERO1_STEP, ZERO2_STEP
from autograder.contract.task import Contract

EXPLAINED_IN = {
    "values": ("zero", "Mistakes that cost people days"),
    "gradients": ("zero", "What Adam hides"),
    "gradient norm": ("zero", "What Adam hides"),
    "shard_optimizer_state.values": ("zero", "Three stages"),
    "global_norm.values": ("zero", "One norm for all devices"),
    "global_norm.other collectives": ("zero", "One norm for all devices"),
    "global_norm.all-reduce bytes": ("zero", "One norm for all devices"),
    "split dims": ("fsdp", "Which leaves, and along which dim"),
    "state bytes per device": ("zero", "Three stages"),
    "communication": ("zero", "Three stages"),
    "all-reduces": ("zero", "One norm for all devices"),
    "all-gather bytes": ("zero", "The update between the halves"),
    "zero1_step.reduce-scatter bytes": ("zero", "The update between the halves"),
    "reduce-scatter bytes": ("zero", "Microbatches: when stage 2 is a bad trade"),
    "all-reduce bytes": ("zero", "The update between the halves"),
    "other collectives": ("zero", "The update between the halves"),
    "live temporaries": ("zero", "One layer's gradient at a time"),
}

VALUES = ("values", "gradients", "gradient norm")
SENT = {
    "| all-gather |": ("all-gather bytes",),
    "| all-reduce |": ("all-reduce bytes",),
    "| any other collective |": ("other collectives",),
}
STEP = {
    **SENT,
    "| reduce-scatter |": ("reduce-scatter bytes",),
    "| live temporaries |": ("live temporaries",),
    "``(params, state, loss, norm)``: updated parameters and state": VALUES,
}
# Pieces of the notebook's text, and the facts that enforce them.
PROMISES = {
    "shard_optimizer_state": {
        "Split leaves by the rule of `shard_params`": ("split dims", "state bytes per device"),
        "Return the state and the specs of the parts.": ("values", "split dims"),
        "| bytes of state on each device |": ("state bytes per device",),
        "| communication |": ("communication",),
        "``(state, specs)``. The state is": ("values", "split dims"),
    },
    "global_norm": {
        "Take two devices.": (),
        "Count each element exactly once, on any mesh.": ("values",),
        "is whole, and the same on every device": ("values",),
        "| all-reduce |": ("all-reduces",),
        "| bytes sent per device |": ("all-reduce bytes",),
        "| any other collective |": ("other collectives",),
        "A scalar, the same on every device.": ("values",),
    },
    "sharded_adamw": {
        **SENT,
        "Write the part of a step that follows the backward pass.": (),
        "leaves that stay whole are already averaged": (),
        "Take the global norm.": ("values",),
        "Otherwise leave it as it is.": ("values",),
        "Update the moments with the clipped gradient": ("values",),
        "Update *this device's part* of each parameter:": ("values",),
        "Put the parameters together again": ("values", "all-gather bytes"),
        "Return the norm before clipping": ("values",),
        "``(params, state, norm)``: the updated parameters, whole": ("values",),
    },
    "zero1_step": {
        **STEP,
        "Write the step: loss and gradient": (),
        "The gradient of a leaf that stays whole is averaged, once.": ("gradients", "all-reduce bytes"),
        "after one step and after three must equal those of a single device": VALUES,
    },
    "zero2_step": {
        **STEP,
        "ZeRO-2 never holds it.": ("live temporaries",),
        "Write the step.": (),
        "Split this device's rows into `num_microbatches` equal parts": ("values",),
        "JAX's own derivative of a scan over layers is not enough": ("live temporaries",),
        "So write the backward pass as a scan of your own": ("live temporaries",),
        "added up as they are, and averaged over devices once per step": ("all-reduce bytes",),
        "A scan's carry must have the same type": (),
        "The loss varies too, so if you take its": (),
    },
}

CONTRACT = Contract(
    "zero",
    (SHARD_OPTIMIZER_STATE, GLOBAL_NORM, SHARDED_ADAMW, ZERO1_STEP, ZERO2_STEP),
    question_points=2,
    explained_in=EXPLAINED_IN,
)

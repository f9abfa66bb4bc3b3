"""The contract of ``transformer_3d``: FSDP, a looping pipeline and tensor parallelism in one step."""

from autograder.chapters.transformer_3d.choose_mesh import CHOOSE_MESH
from autograder.chapters.transformer_3d.layers import LAYERS_3D, STAGE_3D, WHOLE_WEIGHTS
from autograder.chapters.transformer_3d.tasks import FORWARD_3D, INIT_3D, TRAIN_STEP_3D
from autograder.contract.task import Contract

EXPLAINED_IN = {
    "values": ("transformer_3d", "Mistakes that cost people days"),
    "gradients": ("transformer_3d", "Which gradients to reduce, and their scale"),
    "gradient norm": ("transformer_3d", "Which gradients to reduce, and their scale"),
    "split dims": ("transformer_3d", "What each device holds"),
    "state bytes per device": ("transformer_3d", "What each device holds"),
    "communication": ("transformer_3d", "What each device holds"),
    "bfloat16 products": ("transformer_3d", "What each option does"),
    "live temporaries": ("transformer_3d", "Gather once per repeat"),
    "exposed over data": ("transformer_3d", "Gather once per repeat"),
    "all-gather bytes over data": ("transformer_3d", "Gather once per repeat"),
    "reduce-scatter bytes over data": ("transformer_3d", "Gather once per repeat"),
    "permute bytes over pipe": ("transformer_3d", "What is sent"),
    "all-reduce bytes": ("transformer_3d", "What is sent"),
    "other bytes over pipe": ("transformer_3d", "What is sent"),
    "bytes over tensor": ("transformer_3d", "What is sent"),
    "other collectives": ("transformer_3d", "What is sent"),
    "float32 elsewhere": ("transformer_3d", "What each option does"),
    "transfers in one piece": ("transformer_3d", "What each option does"),
    "every choice can be placed": ("planning", "What can be chosen"),
    "memory fits": ("planning", "What is counted as memory"),
    "predicted MFU": ("planning", "What is counted as time"),
    "init_3d.values": ("transformer_3d", "What each device holds"),
    "whole_weights.values": ("transformer_3d", "What each device holds"),
    "stage_3d.values": ("transformer_3d", "Gather once per repeat"),
    "layers_3d.values": ("transformer_3d", "Gather once per repeat"),
    "train_step_3d.values": ("transformer_3d", "Which gradients to reduce, and their scale"),
}

GATHERED, SCATTERED = "all-gather bytes over data", "reduce-scatter bytes over data"
COMPLETE = ("gradients", "gradient norm")
LOW = ("bfloat16 products", "float32 elsewhere")
PROMISES = {
    "init_3d": {
        "bytes held per device": ("state bytes per device",),
        "communication": ("communication",),
        "the local parts, under ``layers``": ("values",),
        "and the ``PartitionSpec`` of each whole leaf": ("split dims",),
    },
    "whole_weights": {
        "it is best to have one rule": (),
        "The loss that you will differentiate": (),
        "per leaf split over `data_axis`": (GATHERED, SCATTERED),
        "per leaf that is whole over some of the axes": ("all-reduce bytes",),
        "any other collective": ("other collectives",),
        "A tree like ``parts``, in ``float32``": ("values",),
        "maps each device's gradient of its own loss": COMPLETE,
    },
    "stage_3d": {
        "all combinations are allowed": ("values",),
        "`parallel`": ("values",),
        "`rings`": ("transfers in one piece", "other collectives"),
        "`dtype`": ("bfloat16 products",),
        "`rate`": ("values",),
        "everything else stays `float32`": LOW,
        "uses `layer_key(key, microbatch, number)`": ("values",),
        "sent over `tensor`": ("bytes over tensor",),
        "sent in one piece (not around a ring), with `rings`": ("transfers in one piece",),
        "all-reduced": ("all-reduce bytes",),
        "any other collective": ("other collectives",),
        "This device's part of each sequence, like ``x``": ("values", *COMPLETE),
    },
    "layers_3d": {
        "Once per repeat.": (),
        "reduce-scattered **once**": (SCATTERED,),
        "A layer's weights are used once for every microbatch": (),
        "So with `options.remat` write the backward pass": ("live temporaries",),
        "may be anything": (),
        "gathered over `data`": (GATHERED,),
        "reduce-scattered over `data`": (SCATTERED,),
        "permuted over `pipe`": ("permute bytes over pipe",),
        "all-reduced": ("all-reduce bytes",),
        "sent over `tensor`": ("bytes over tensor",),
        "sent in one piece (not around a ring), with `rings`": ("transfers in one piece",),
        "any other collective": ("other collectives",),
        "live temporaries": ("live temporaries",),
        "If `dtype` is bfloat16": LOW,
        "On the last stage the outputs": ("values",),
        "The gradient of ``parts`` is complete": COMPLETE,
    },
    "forward_3d": {
        "`num_microbatches`": ("values",),
        "`rings`": ("transfers in one piece", "other collectives"),
        "`dtype`": LOW,
        "`remat`": ("live temporaries",),
        "uses `fold_in(key, i)`": ("values",),
        "gathered over `data`": (GATHERED,),
        "reduce-scattered over `data`": (SCATTERED,),
        "permuted over `pipe`": ("permute bytes over pipe",),
        "anything else over `pipe`": ("other bytes over pipe",),
        "all-reduced": ("all-reduce bytes",),
        "sent over `tensor`": ("bytes over tensor",),
        "any other collective": ("other collectives",),
        "exposed over `data`": ("exposed over data",),
        "live temporaries": ("live temporaries",),
        "Values and gradients must equal those of a single device": ("values", *COMPLETE),
        "The mean loss of these rows": ("values",),
    },
    "train_step_3d": {
        "Scale every gradient by": COMPLETE,
        "The returned loss is the mean over the rows of all pipelines": ("values",),
        "Use `forward_3d`, your own from above": (),
        "sent in addition to `forward_3d`": (
            *(GATHERED, SCATTERED, "permute bytes over pipe", "other bytes over pipe"),
            *("bytes over tensor", "all-reduce bytes", "other collectives"),
        ),
        "after 20 steps": ("values",),
        "the updated parts, and the mean loss over all rows": ("values",),
    },
    "choose_mesh": {
        "Return a `Choice` that fits": ("memory fits", "predicted MFU"),
        "every choice": ("every choice can be placed",),
        "memory": ("memory fits",),
        "predicted MFU": ("predicted MFU",),
        "Allowed values are": ("every choice can be placed",),
        "Mesh, microbatches, repeats, remat, and the ZeRO stage": ("every choice can be placed",),
        "ValueError: Nothing fits.": ("every choice can be placed",),
    },
}

TASKS = (INIT_3D, WHOLE_WEIGHTS, STAGE_3D, LAYERS_3D, FORWARD_3D, TRAIN_STEP_3D, CHOOSE_MESH)
CONTRACT = Contract("transformer_3d", TASKS, question_points=2, explained_in=EXPLAINED_IN)

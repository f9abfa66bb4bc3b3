"""The contract of ``looping_pipeline``: several small stages on every device."""

from autograder.chapters.looping_pipeline.schedule import LAYERS_OF_STAGE, LOOP_POSITION
from autograder.chapters.looping_pipeline.tasks import EXECUTE_LOOPING_PIPELINE, LOOPING_TRAIN_STEP
from autograder.contract.task import Contract

EXPLAINED_IN = {
    "values": ("looping_pipeline", "Mistakes that cost people days"),
    "gradients": ("looping_pipeline", "Mistakes that cost people days"),
    "gradient norm": ("looping_pipeline", "Mistakes that cost people days"),
    "bubble": ("looping_pipeline", "How long it takes"),
    "permute bytes": ("looping_pipeline", "What it costs"),
    "other collectives": ("looping_pipeline", "What it costs"),
    "exposed over data": ("looping_pipeline", "Averaging a repeat's gradients while others run"),
    "FLOPs": ("looping_pipeline", "What it costs"),
    "live temporaries": ("looping_pipeline", "What it costs"),
    "all-reduce bytes": ("looping_pipeline", "Averaging a repeat's gradients while others run"),
    "layers_of_stage.values": ("looping_pipeline", "What each device holds"),
    "loop_position.values": ("looping_pipeline", "How long it takes"),
    "execute_looping_pipeline.values": ("looping_pipeline", "How long it takes"),
    "execute_looping_pipeline.gradients": ("looping_pipeline", "How long it takes"),
}

PROMISES = {
    "layers_of_stage": {
        "Altogether, it must go through the layers": ("values",),
        "Return a tuple with one tuple": ("values",),
        "raise a `ValueError` whose message": ("values",),
        "One tuple for each repeat": ("values",),
        "ValueError: The layers cannot": ("values",),
    },
    "loop_position": {
        "Draw it for 2 stages": (),
        "Draw one of each": (),
        "It is called for every tick and every stage": ("values",),
        "``(microbatch, repeat)``, both from 0": ("values",),
    },
    "execute_looping_pipeline": {
        "must be kept until their turn comes": ("values",),
        "No garbage may reach a result": ("values",),
        "Return `[num_microbatches, microbatch_size, ...]`": ("values",),
        "Everything must be differentiable": ("gradients",),
        "| bubble, with a free network |": ("bubble",),
        "| bytes permuted, forward and backward each |": ("permute bytes",),
        "| any other collective | none |": ("other collectives",),
        "The test cases have `M` above": ("values", "gradients"),
        "``[num_microbatches, microbatch_size, ...]``": ("values",),
    },
    "looping_train_step": {
        "So split the ticks into blocks": (),
        "So a block needs the weights of two repeats": (),
        "The timeline's rules": (),
        "`batch` has the rows of this device's pipeline": (),
        "Split them into `num_microbatches` equal parts": ("values",),
        "`key` is the same on every device": (),
        "`model.layer(weights, x, layer_key(key, m, l))`": ("values", "gradients"),
        "Recompute each tick's layers": ("live temporaries",),
        "Update by plain SGD": ("values", "gradients", "gradient norm"),
        "Return the parameters and that loss": ("values",),
        "| exposed over `data`": ("exposed over data",),
        "| FLOPs |": ("FLOPs",),
        "| live temporaries |": ("live temporaries",),
        "loss is the mean over the unmasked part": ("values",),
        "| all-reduce | gradients and two scalars once": ("all-reduce bytes",),
        "| all-reduce over `pipe` |": ("all-reduce bytes",),
        "| bytes permuted over `pipe` |": ("permute bytes",),
        "| any other collective | none |": ("other collectives",),
        "``(params, loss)``": ("values",),
    },
}

CONTRACT = Contract(
    "looping_pipeline",
    (LAYERS_OF_STAGE, LOOP_POSITION, EXECUTE_LOOPING_PIPELINE, LOOPING_TRAIN_STEP),
    question_points=2,
    explained_in=EXPLAINED_IN,
)

"""The contract of ``looping_pipeline``: several small stages on every device."""

from autograder.chapters.looping_pipeline.execute import EXECUTE_LOOPING_PIPELINE
from autograder.chapters.looping_pipeline.schedule import LAYERS_OF_STAGE, LOOP_POSITION
from autograder.chapters.looping_pipeline.step import LOOPING_TRAIN_STEP
from autograder.contract.task import Contract

READ = {
    "values": ("looping_pipeline", "Mistakes that cost people days"),
    "gradients": ("looping_pipeline", "Mistakes that cost people days"),
    "gradient norm": ("looping_pipeline", "Mistakes that cost people days"),
    "bubble": ("looping_pipeline", "How long it takes"),
    "permute bytes": ("looping_pipeline", "What it costs"),
    "other collectives": ("looping_pipeline", "What it costs"),
    "exposed over data": ("looping_pipeline", "Average while others run"),
    "FLOPs": ("looping_pipeline", "What it costs"),
    "live temporaries": ("looping_pipeline", "What it costs"),
    "all-reduce bytes": ("looping_pipeline", "Average while others run"),
    "layers_of_stage.values": ("looping_pipeline", "What each device holds"),
    "loop_position.values": ("looping_pipeline", "How long it takes"),
    "execute_looping_pipeline.values": ("looping_pipeline", "How long it takes"),
    "execute_looping_pipeline.gradients": ("looping_pipeline", "How long it takes"),
}

PROMISES = {
    "layers_of_stage": {
        "All the way it must meet the layers": ("values",),
        "Return a tuple with one tuple": ("values",),
        "raise `ValueError` with a sentence": ("values",),
        "One tuple for each repeat": ("values",),
        "ValueError: The layers cannot": ("values",),
    },
    "loop_position": {
        "Draw it for 2 stages": (),
        "Draw one of each": (),
        "It is asked for every tick and every stage": ("values",),
        "``(microbatch, repeat)``, both from 0": ("values",),
    },
    "execute_looping_pipeline": {
        "must be kept until its turn comes": ("values",),
        "No garbage may reach a result": ("values",),
        "Return `[num_microbatches, microbatch_size, ...]`": ("values",),
        "Everything must be differentiable": ("gradients",),
        "| bubble, with a free network |": ("bubble",),
        "| bytes permuted, forward and backward each |": ("permute bytes",),
        "| any other collective | none |": ("other collectives",),
        "What you are judged on has `M` above": ("values", "gradients"),
        "``[num_microbatches, microbatch_size, ...]``": ("values",),
    },
    "looping_train_step": {
        "So cut the ticks into blocks": (),
        "So a block needs the weights of two repeats": (),
        "The timeline's rules": (),
        "`batch` has the rows of this device's pipeline": (),
        "Take them in `num_microbatches` equal parts": ("values",),
        "`key` is the same on every device": (),
        "`model.layer(weights, x, layer_key(key, m, l))`": ("values", "gradients"),
        "Recompute each tick's layers": ("live temporaries",),
        "Update by plain SGD": ("values", "gradients", "gradient norm"),
        "Return the parameters and that loss": ("values",),
        "| exposed over `data`": ("exposed over data",),
        "| FLOPs |": ("FLOPs",),
        "| temporaries that live at once |": ("live temporaries",),
        "loss is the mean over what counts": ("values",),
        "| all-reduce | gradients and two numbers once": ("all-reduce bytes",),
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
    read=READ,
)

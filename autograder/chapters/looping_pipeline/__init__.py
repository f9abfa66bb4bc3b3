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
    "predicted time": ("looping_pipeline", "Average while others run"),
    "live temporaries": ("looping_pipeline", "What it costs"),
    "all-reduce bytes": ("looping_pipeline", "Average while others run"),
}

CONTRACT = Contract(
    "looping_pipeline",
    (LAYERS_OF_STAGE, LOOP_POSITION, EXECUTE_LOOPING_PIPELINE, LOOPING_TRAIN_STEP),
    question_points=2,
    read=READ,
)

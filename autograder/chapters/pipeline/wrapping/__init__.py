"""The functions of ``pipeline`` as the tracer knows them."""

from autograder.chapters.pipeline.wrapping.model import wrap_loss, wrap_step
from autograder.chapters.pipeline.wrapping.schedule import wrap_execute, wrap_split, wrap_tick
from autograder.contract.wrapping import Wrapping

WRAPPINGS = (
    Wrapping("split_microbatches", "(batch, num_microbatches)", wrap_split),
    Wrapping("pipeline_tick", "(stage, microbatches, arrived, tick, axis_name)", wrap_tick),
    Wrapping("execute_pipeline", "(stage, microbatches, axis_name)", wrap_execute),
    Wrapping("pipeline_loss", "(params, batch, key, model, num_microbatches, axis_name)", wrap_loss),
    Wrapping(
        "pipeline_train_step",
        "(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate)",
        wrap_step,
    ),
)

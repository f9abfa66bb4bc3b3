"""The functions of ``pipeline`` as the tracer wraps them."""

from autograder.chapters.pipeline.wrapping.model import StepSizes, wrap_loss, wrap_step
from autograder.chapters.pipeline.wrapping.schedule import Blocks, wrap_execute, wrap_split, wrap_tick
from autograder.contract.wrapping import Wrapping

_STEP = "(params, batch, key, model, num_microbatches, pipe_axis, data_axis, learning_rate)"
WRAPPINGS = (
    Wrapping("split_microbatches", "(batch, num_microbatches)", wrap_split, Blocks),
    Wrapping("pipeline_tick", "(stage, microbatches, arrived, tick, axis_name)", wrap_tick, Blocks),
    Wrapping("execute_pipeline", "(stage, microbatches, axis_name)", wrap_execute, Blocks),
    Wrapping("pipeline_loss", "(params, batch, key, model, num_microbatches, axis_name)", wrap_loss, StepSizes),
    Wrapping("pipeline_train_step", _STEP, wrap_step, StepSizes),
)
